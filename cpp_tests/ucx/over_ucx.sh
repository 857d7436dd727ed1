#!/usr/bin/env bash
# over_ucx.sh system|wheel LANES PROGRAM [ARGUMENTS...]
#
# Runs a suite over UCX: the system's, or the one that scripts/install-ucx fetches from PyPI. Exits with
# 77 where it is not there, and says so in the list of skipped tests.
set -euo pipefail
which=$1 lanes=$2
shift 2

skip() {
  echo "NOT TESTED, $1"
  if [ -n "${KVFERRY_SKIP_FILE:-}" ]; then echo "NOT TESTED, $1" >>"$KVFERRY_SKIP_FILE"; fi
  exit 77
}
case $which in
  system)
    library=libucp.so.0
    python3 -c 'import ctypes; ctypes.CDLL("libucp.so.0")' 2>/dev/null ||
      skip "NO UCX ON THIS SYSTEM: $(basename "$1") over $which UCX, lanes $lanes (scripts/install-ucx)"
    ;;
  wheel)
    library=$(compgen -G "${KVFERRY_UCX_WHEEL:-target/ucx}/lib/python*/site-packages/libucx/lib/libucp.so.0") ||
      skip "NO UCX FROM PYPI: $(basename "$1") over $which UCX, lanes $lanes (scripts/install-ucx)"
    library=$(realpath "$library")
    ;;
esac
# UCX writes its log to standard output, where the programs of the suites answer.
export KVFERRY_TRANSPORTS=ucx KVFERRY_UCX_LIBRARY=$library UCX_LOG_LEVEL=${UCX_LOG_LEVEL:-fatal}
if [ "$lanes" != any ]; then export UCX_TLS=$lanes; fi
exec "$@"
