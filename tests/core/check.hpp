// A small test harness, so that the C++ tests need no installed GoogleTest.
//
//   TEST(row_sizes) { CHECK_EQ(row_bytes(128), 256U); }
//
// A failing CHECK or CHECK_EQ ends its test. CHECK_THROWS expects an exception of the given type.
// A test whose name begins with `long_` runs only if a filter begins so, too.
// Use the macros on the test's own thread only; other threads hand their results over.
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

// The failure of a test. Not derived from std::exception, so that neither CHECK_THROWS(...,
// std::exception) nor code under test that catches std::exception can swallow it.
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
    out << +value;  // prints a byte as a number
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
    return std::cmp_equal(a, b);  // -1 does not equal a large unsigned number
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

// Runs the test and returns whether it passed. Prints the reason of a failure to stderr.
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

// Every `parts`-th test, from number `part` on.
struct Share {
  size_t part = 0;
  size_t parts = 1;
};

// Takes "--part=K/N", the K-th of N parts from 1 on, out of the arguments.
inline Share take_share(std::vector<std::string_view>& arguments) {
  constexpr std::string_view kOption = "--part=";
  Share share;
  std::erase_if(arguments, [&](std::string_view argument) {
    if (!argument.starts_with(kOption)) return false;
    const std::string value(argument.substr(kOption.size()));
    const size_t slash = value.find('/');
    share = {std::stoul(value) - 1, std::stoul(value.substr(slash + 1))};
    if (share.part >= share.parts) throw std::invalid_argument("--part=" + value);
    return true;
  });
  return share;
}

// A range of seeds, for a test that runs many.
struct Seeds {
  uint64_t first = 0;
  uint64_t count = 0;
};

// Those of "--seeds=FIRST:COUNT"; none where it is not given.
inline Seeds& asked_seeds() {
  static Seeds seeds;
  return seeds;
}

inline void take_seeds(std::vector<std::string_view>& arguments) {
  constexpr std::string_view kOption = "--seeds=";
  std::erase_if(arguments, [&](std::string_view argument) {
    if (!argument.starts_with(kOption)) return false;
    const std::string value(argument.substr(kOption.size()));
    const size_t colon = value.find(':');
    asked_seeds() = {std::stoull(value), std::stoull(value.substr(colon + 1))};
    if (asked_seeds().count == 0) throw std::invalid_argument("--seeds=" + value);
    return true;
  });
}

// Runs the tests whose name contains one of the arguments; without any, all but the long tests.
// With "--part=K/N" only some of them, so that N processes share the tests. With
// "--seeds=FIRST:COUNT" tests of many seeds run these instead of their own.
inline int run(std::vector<std::string_view> filters) {
  constexpr std::string_view kLong = "long_";
  const Share share = take_share(filters);
  take_seeds(filters);
  int passed = 0;
  int failed = 0;
  int left_out = 0;
  for (size_t number = share.part; number < tests().size(); number += share.parts) {
    const Test& test = tests()[number];
    const std::string_view name = test.name;
    const bool is_long = name.starts_with(kLong);
    bool wanted = filters.empty() && !is_long;
    for (const std::string_view filter : filters) {
      const bool may_run = !is_long || filter.starts_with(kLong);
      wanted = wanted || (may_run && name.find(filter) != std::string_view::npos);
    }
    if (filters.empty() && is_long) ++left_out;
    if (wanted) ++(run_one(test) ? passed : failed);
  }
  if (left_out > 0) std::cout << left_out << " long tests left out (core_tests long_)" << std::endl;
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
