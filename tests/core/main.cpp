#include "check.hpp"

// NOLINTNEXTLINE(bugprone-exception-escape): a wrong argument may end it so.
int main(int argc, char** argv) { return check::run({argv + 1, argv + argc}); }
