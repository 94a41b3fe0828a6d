#!/usr/bin/env bash
# Measures the host backend and writes what is committed under benchmarks/results/:
#
#   host_targets.jsonl   the three geometries that Fanfold promises a factor for, with the baseline
#   host_tokens.jsonl    both modes over 16 to 4096 tokens
#   host_ranks.jsonl     both modes over 1 to 8 ranks
#   host_top_k.jsonl     both modes over 1 to 32 experts per token
#   host.png             their picture
#   host_fit.txt         how cost grows (benchmarks/fit.py)
#
# Use: benchmarks/run_host.sh [folder]   on a machine that does nothing else; about ten minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

results="${1:-benchmarks/results}"
fanfold=(.venv/bin/fanfold)
mkdir -p "$results"
rm -f "$results"/host_{targets,tokens,ranks,top_k}.jsonl

bench() { # bench FILE MODE OPTIONS...
  local file="$results/host_$1.jsonl" mode="$2"
  shift 2
  echo "fanfold bench $mode $*"
  "${fanfold[@]}" bench "$mode" --baseline --json "$file" "$@" >/dev/null
}

bench targets low-latency --tokens 128 --hidden 1024 --top-k 8 --experts 64 --iterations 500
bench targets low-latency --tokens 128 --hidden 1024 --top-k 22 --experts 512 --iterations 300
bench targets high-throughput --tokens 4096 --hidden 1024 --top-k 8 --experts 64 --iterations 40

# As many rounds for each point as take about the same time.
for tokens in 16 32 64 128 256 512 1024 2048 4096; do
  rounds=$((40 + 20000 / tokens))
  bench tokens low-latency --tokens "$tokens" --iterations "$((rounds > 400 ? 400 : rounds))"
  bench tokens high-throughput --tokens "$tokens" --iterations "$((rounds > 400 ? 400 : rounds))"
done

# 840 experts can be divided by every number of ranks from 1 to 8.
for ranks in 1 2 3 4 5 6 7 8; do
  bench ranks low-latency --ranks "$ranks" --experts 840 --tokens 128 --iterations 200
  bench ranks high-throughput --ranks "$ranks" --experts 840 --tokens 1024 --iterations 40
done

for top_k in 1 2 4 8 16 32; do
  bench top_k low-latency --top-k "$top_k" --tokens 128 --iterations 200
  bench top_k high-throughput --top-k "$top_k" --tokens 1024 --iterations 40
done

.venv/bin/python benchmarks/fit.py "$results" | tee "$results/host_fit.txt"
"${fanfold[@]}" plot "$results"/host_{tokens,ranks,top_k}.jsonl --out "$results/host.png"
