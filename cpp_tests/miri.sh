#!/usr/bin/env bash
# Runs the C interface's Rust tests under Miri; 77 (skipped) where nightly has none.
set -euo pipefail
if ! cargo +nightly miri --version >/dev/null 2>&1; then
  why="rust.miri: no Miri (rustup component add miri --toolchain nightly)"
  echo "$why"
  if [ -n "${KVFERRY_SKIP_FILE:-}" ]; then echo "$why" >>"$KVFERRY_SKIP_FILE"; fi
  exit 77
fi
tests=()
for file in tests/capi_*.rs; do
  name=$(basename "$file" .rs)
  tests+=(--test "$name")
done
export MIRIFLAGS="-Zmiri-disable-isolation ${MIRIFLAGS:-}"
# Unit tests of the boundary, and every test of the C functions.
cargo +nightly miri test --locked --features testing --lib ffi::
exec cargo +nightly miri test --locked --features testing "${tests[@]}"
