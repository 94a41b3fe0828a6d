#!/usr/bin/env bash
# Runs small rounds of one rank or of some, and the kernel that quantises rows, under
# compute-sanitizer: memcheck (accesses outside of memory), racecheck (shared memory without order)
# and synccheck (barriers that not all reach).
#
# Use: tools/sanitize_gpu.sh [--ranks N] [--only PART]... [tool...]
#      PYTHON=python3 where there is no .venv
#      PART is low-latency, few-tokens, high-throughput, formats, grouped-gemm or fused-moe; without
#      one all run.
#      One rank by default; several time-slice the GPUs where there are fewer.
# Needs a GPU and compute-sanitizer, of the CUDA toolkit. Exits with 1 if a tool found something or a
# program failed; each tool's last line says which: 9 if it found something in programs that ended
# well, else their exit code.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-.venv/bin/python}"
parts=()
ranks=1
if [[ "${1:-}" == --ranks ]]; then
  ranks="${2:?--ranks is followed by their number}"
  shift 2
fi
while [[ "${1:-}" == --only ]]; do
  case "${2:-}" in
    low-latency | few-tokens | high-throughput | formats | grouped-gemm | fused-moe)
      parts+=("$2")
      ;;
    *)
      echo "--only is followed by low-latency, few-tokens, high-throughput, formats, grouped-gemm" \
        "or fused-moe, not by '${2:-}'" >&2
      exit 2
      ;;
  esac
  shift 2
done
tools=("$@")
[[ ${#tools[@]} -gt 0 ]] || tools=(memcheck racecheck synccheck)

sanitizer="$(command -v compute-sanitizer || true)"
if [[ -z "$sanitizer" && -x /usr/local/cuda/bin/compute-sanitizer ]]; then
  sanitizer=/usr/local/cuda/bin/compute-sanitizer
fi
if [[ -z "$sanitizer" ]]; then
  echo 'compute-sanitizer is not on the PATH: it comes with the CUDA toolkit' >&2
  exit 2
fi

failed=0
for tool in "${tools[@]}"; do
  echo "== $tool"
  # PyTorch asks the driver for things that it may refuse; only what kernels do counts.
  options=()
  [[ "$tool" != memcheck ]] || options=(--report-api-errors no)
  log="$(mktemp)"
  status=0
  "$sanitizer" --tool "$tool" "${options[@]}" --target-processes all --error-exitcode 9 \
    "$python" tests/gpu/sanitize.py --ranks "$ranks" "${parts[@]}" 2>&1 | tee "$log" || status=$?
  ((status == 0)) || failed=1
  # Each process has a summary of its own; the exit code may be that of the first one only.
  if grep -qE 'SUMMARY: *[1-9]' "$log"; then failed=1; fi
  rm -f "$log"
  echo "== $tool: exit code $status"
done
((failed == 0)) || echo "== something was found" >&2
exit "$failed"
