"""Memory that the ranks of a group share: on one host, or between its GPUs."""
