#!/usr/bin/env bash
# dry_run.sh BUILD DRIVER: packs what BUILD has, unpacks it elsewhere and runs it there on the test
# double DRIVER.
set -euo pipefail
build=$1 driver=$2
scripts=$(cd "$(dirname "$0")/../../scripts" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$scripts/gpu-test" --pack "$work/bundle.tar.gz" --build "$build"
tar -C "$work" -xzf "$work/bundle.tar.gz"
cd "$work/kvferry-gpu"
if ! command -v nvidia-smi >/dev/null && scripts/gpu-test --run; then
  echo "without a GPU it must refuse to run" >&2
  exit 1
fi
log=$work/log
scripts/gpu-test --run --quick --driver "$driver" | tee "$log"
grep -q "TEST DOUBLE OF THE CUDA DRIVER. NO GPU IS MEASURED" "$log"
grep -q "NO MEASUREMENT IS WRITTEN" "$log"
# The summary has both kinds of cases, with numbers.
grep -Eq '^\| 16384 B \| [0-9.]+ \| [0-9.]+ \| [0-9.]+ \| 0.9, (met|NOT MET) \| [0-9.]+ \|' "$log"
grep -Eq '^\| 64 B runs, NHD to HND \| [0-9.]+ \| [0-9.]+ \| [0-9.]+ \| 0.6, (met|NOT MET) \|' "$log"
[ -z "$(ls docs/measurements)" ] || { echo "a measurement was written" >&2; exit 1; }
