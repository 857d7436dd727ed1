#!/usr/bin/env bash
# run.sh TEST MPIRUN PROGRAM ITERATIONS: 8 ranks on this host; 77 (skipped) without MPI.
set -euo pipefail
test=$1 mpirun=$2 program=$3 iterations=$4
if [ -z "$program" ] || ! [ -x "$mpirun" ]; then
  why="$test: no MPI (scripts/install-tools installs openmpi-bin and libopenmpi-dev)"
  echo "$why"
  if [ -n "${KVFERRY_SKIP_FILE:-}" ]; then echo "$why" >>"$KVFERRY_SKIP_FILE"; fi
  exit 77
fi
# Containers: Open MPI may not look into other processes' memory, nor is there a remote shell.
export OMPI_MCA_btl_vader_single_copy_mechanism=none OMPI_MCA_plm_rsh_agent=true
exec "$mpirun" --oversubscribe --allow-run-as-root -n 8 "$program" "$iterations"
