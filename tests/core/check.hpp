// The C++ tests' own small harness: a stranger's machine has a compiler, not always GoogleTest.
//
//   TEST(row_sizes) { CHECK_EQ(row_bytes(128), 256U); }
//
// CHECK and CHECK_EQ end the test they fail in; CHECK_THROWS wants an exception of one type.
// Not for use on other threads than the test's own: hand results over, then check.
#pragma once

#include <cstdlib>
#include <exception>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace check {

// A test that did not hold. Not derived from std::exception, so that CHECK_THROWS(...,
// std::exception) and code under test that catches everything standard cannot swallow it.
struct Failure {
  std::string message;
};

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> registered;
  return registered;
}

inline bool add(const char* name, void (*body)()) {
  tests().push_back({name, body});
  return true;
}

template <typename T>
void print(std::ostream& out, const T& value) {
  if constexpr (std::is_enum_v<T>) {
    out << +static_cast<std::underlying_type_t<T>>(value);
  } else if constexpr (std::is_same_v<T, bool>) {
    out << (value ? "true" : "false");
  } else if constexpr (std::is_integral_v<T>) {
    out << +value;  // a byte is a number here, not a letter
  } else if constexpr (requires { out << value; }) {
    out << value;
  } else if constexpr (requires { value.begin() != value.end(); }) {
    out << '[';
    for (const char* comma = ""; const auto& element : value) {
      out << std::exchange(comma, ", ");
      print(out, element);
    }
    out << ']';
  } else {
    out << "(a value without operator<<)";
  }
}

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  // NOLINTNEXTLINE(bugprone-std-exception-baseclass): see Failure.
  throw Failure{std::string(file) + ":" + std::to_string(line) + ": " + what};
}

template <typename A, typename B>
bool equal(const A& a, const B& b) {
  if constexpr (std::is_integral_v<A> && std::is_integral_v<B> && !std::is_same_v<A, bool> &&
                !std::is_same_v<B, bool> && !std::is_same_v<A, char> && !std::is_same_v<B, char>) {
    return std::cmp_equal(a, b);  // -1 is no large unsigned number
  } else {
    return a == b;
  }
}

template <typename A, typename B>
void expect_equal(const A& a, const B& b, std::string_view text, const char* file, int line) {
  if (equal(a, b)) return;
  std::ostringstream out;
  out.precision(17);
  out << "CHECK_EQ(" << text << "): ";
  print(out, a);
  out << " != ";
  print(out, b);
  fail(file, line, out.str());
}

// Runs the body and says whether it held; the reason goes to stderr.
inline bool run_one(const Test& test) {
  std::string reason;
  try {
    test.body();
    return true;
  } catch (const Failure& failure) {
    reason = failure.message;
  } catch (const std::exception& error) {
    reason = std::string("unexpected exception: ") + error.what();
  }
  std::cerr << "FAILED " << test.name << "\n  " << reason << std::endl;
  return false;
}

// Each argument is a part of a test's name; without one, every test runs.
inline int run(const std::vector<std::string_view>& filters) {
  int passed = 0;
  int failed = 0;
  for (const Test& test : tests()) {
    bool wanted = filters.empty();
    for (const std::string_view filter : filters) {
      wanted = wanted || std::string_view(test.name).find(filter) != std::string_view::npos;
    }
    if (wanted) ++(run_one(test) ? passed : failed);
  }
  std::cout << passed << " passed, " << failed << " failed" << std::endl;
  return failed == 0 && passed > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace check

#define TEST(name)                                                                   \
  static void test_##name();                                                         \
  [[maybe_unused]] static const bool added_##name = check::add(#name, &test_##name); \
  static void test_##name()

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) check::fail(__FILE__, __LINE__, "CHECK(" #condition ")"); \
  } while (false)

#define CHECK_EQ(a, b) check::expect_equal((a), (b), #a ", " #b, __FILE__, __LINE__)

#define CHECK_THROWS(expression, type)                                                 \
  do {                                                                                 \
    bool thrown = false;                                                               \
    try {                                                                              \
      static_cast<void>(expression);                                                   \
    } catch (const type&) {                                                            \
      thrown = true;                                                                   \
    }                                                                                  \
    if (!thrown) check::fail(__FILE__, __LINE__, #expression " did not throw " #type); \
  } while (false)
