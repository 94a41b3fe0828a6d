#include "check.hpp"

int main(int argc, char** argv) { return check::run({argv + 1, argv + argc}); }
