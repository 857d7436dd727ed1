#!/usr/bin/env bash
# run.sh TEST PROGRAM: runs the example; 77 (skipped), with a line that says so, without a GPU or a
# CUDA compiler.
set -uo pipefail
test=$1 program=$2
why=
if [ -z "$program" ]; then
  why="no CUDA compiler, not built"
else
  "$program"
  rc=$?
  [ $rc -eq 77 ] || exit $rc
  why="no CUDA device"
fi
echo "$test: $why"
if [ -n "${KVFERRY_SKIP_FILE:-}" ]; then echo "$test: $why" >>"$KVFERRY_SKIP_FILE"; fi
exit 77
