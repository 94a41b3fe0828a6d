#!/usr/bin/env bash
# Runs probes on the GPUs of this host and writes their JSON lines.
#   run.sh RESULTS_FOLDER [probe ...]        probes: launch positions push low_latency:N (a geometry)
#                                            link ht_dispatch ht_combine
set -u
folder=$1; shift
here=$(cd "$(dirname "$0")" && pwd)
probes=("$@")
[ ${#probes[@]} -gt 0 ] || probes=(launch positions push low_latency:0 low_latency:1 low_latency:2
                                link ht_dispatch ht_combine)
mkdir -p "$folder"
"$here/build/launch" 2>/dev/null; [ $? -eq 2 ] || make -C "$here" -j8 all || exit 1
# Loading a kernel at its first launch may wait for one that is itself waiting for a peer.
export CUDA_MODULE_LOADING=EAGER
for probe in "${probes[@]}"; do
  name=${probe%%:*}
  argument=${probe#"$name"}
  results=$folder/${probe//:/_}.jsonl
  # shellcheck disable=SC2086
  timeout -k 5 "${PROBE_TIMEOUT:-150}" "$here/build/$name" "$results" ${argument#:} >/dev/null
  echo "$probe: exit $?, $(wc -l <"$results") lines"
done
