"""What benches and tests share: workloads, an independent oracle, a rival, timers and reports."""
