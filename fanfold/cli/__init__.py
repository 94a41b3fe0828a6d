"""The command line: `fanfold demo`, `bench`, `plot`, `doctor`, `env`."""
