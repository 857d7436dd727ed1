#!/usr/bin/env python3
"""Each deviation of the library's device code must fail the test that is named beside it, in the way that is
named there, on the library with fault points; without a deviation that test passes. Any other failure, as a
crash or a library that is missing, has noticed nothing.

mutants.py cuda|gets FOLDER     FOLDER: of the test programs. Deviations come after those of KVF_FAULT.
"""

import os
import subprocess
import sys
from typing import NamedTuple


class Mutant(NamedTuple):
    deviation: str
    program: str
    test: str
    says: str  # the failed expectation, as the test prints it
    environment: dict = {}


BEFORE_THE_STREAM = "  transfer.poll()\n    Which is: 0\n  KVF_IN_PROGRESS\n"
NO_OVERLAP = "  wire.copied()\n    Which is: 3145728\n  4 * kMib\n"

CUDA = [
    Mutant("cuda_no_source_gate", "cuda_streams_test",
           "Streams.APublicationIsReadWhenItsStreamHasComeSoFar", BEFORE_THE_STREAM),
    Mutant("cuda_no_destination_gate", "cuda_streams_test",
           "Streams.EarlierUsersOfTheDestinationsSlotsAreDoneFirst", BEFORE_THE_STREAM),
    Mutant("cuda_gate_wrong_stream", "cuda_streams_test",
           "Streams.APublicationIsReadWhenItsStreamHasComeSoFar", BEFORE_THE_STREAM),
    Mutant("cuda_no_event_wait", "cuda_streams_test",
           "Streams.APublicationIsReadWhenItsStreamHasComeSoFar", BEFORE_THE_STREAM),
    Mutant("cuda_no_stream_wait", "cuda_streams_test", "Streams.AStreamThatWaitsGoesOnAfterSuccess",
           "Value of: consumer.idle()\n  Actual: true\n"),
    Mutant("cuda_keep_context", "cuda_streams_test", "Streams.TheCallersContextIsAsItWas",
           "  before\n    Which is: 1\nregistering\n"),
    Mutant("cuda_no_copy_wait", "cuda_streams_test", "Streams.ADoneTransfersBytesAreThere",
           "  now\n    Which is: { '\\0', '\\0', "),
    Mutant("cuda_no_send_wait", "cuda_memory_test", "Processes/Between.EveryByteArrives/device_to_pool",
           '  two.here.differs(5, 7, 3)\n    Which is: "view ',
           {"KVF_CUDA_DOUBLE_DELAY_US": "50000-50000"}),
    Mutant("cuda_no_ahead", "cuda_sockets_test", "Sockets.CopiesAndSendsOverlapAtBothEnds", NO_OVERLAP),
    Mutant("cuda_one_landing", "cuda_sockets_test", "Sockets.CopiesAndSendsOverlapAtBothEnds", NO_OVERLAP),
    Mutant("cuda_buffer_before_sent", "cuda_sockets_test", "Sockets.CopiesAndSendsOverlapAtBothEnds",
           '  here.differs(to[i], 7, from[i])\n    Which is: "view '),
    Mutant("cuda_overlap", "cuda_memory_test", "DeviceMemory.SourceAndDestinationMustNotOverlap",
           "  same.wait(kLong)\n    Which is: 0\n  KVF_ERR_TRANSFER\n"),
    Mutant("cuda_keep_mapping", "cuda_memory_test", "DeviceMemory.ADeadPeersMemoryIsUnmapped",
           "Value of: eventually([&] { return books().ipc_mappings == 0; })\n  Actual: false\n"),
    Mutant("cuda_no_unmap_wait", "cuda_memory_test",
           "DeviceMemory.APoolIsNotFreeWhileAStoppedReaderHasItMapped",
           "  here.unregister(300ms)\n    Which is: 0\n  KVF_ERR_BUSY\n"),
    Mutant("cuda_keep_pin", "cuda_memory_test", "DeviceMemory.PinnedPoolsAreUnpinnedBeforeTheyMayBeFreed",
           "  books().pinned_registrations\n    Which is: 2\n  1u\n"),
    # This test gives the deviation to the reader alone.
    Mutant("cuda_attest_early", "cuda_attest_test", "Attest.AnOfferThatEndsDuringTheCopyIsExpired",
           "  transfer.wait(kLong)\n    Which is: 0\n  KVF_ERR_EXPIRED\n"),
]

FLUSHED = 'Expected: (calls("cuFlushGPUDirectRDMAWrites")) > (before), actual: 0 vs 0\n'
HOST = {"KVF_TEST_MEMORY": "host"}
DEVICE = {"KVF_TEST_MEMORY": "device"}

# Over UCX gets.
GETS = [
    Mutant("ucx_no_flush", "ucx_device_gets_test", "DeviceGetsFlush.IsAskedForWhereTheDeviceNeedsIt",
           FLUSHED, HOST),
    Mutant("ucx_no_flush", "ucx_device_gets_test",
           "By/DeviceGetsCutOff.IsFlushedBeforeItIsSafe/Cancel", FLUSHED, HOST),
    Mutant("cuda_keep_context", "ucx_device_gets_test",
           "Between/DeviceGets.EveryByteArrivesAndNothingIsStaged/pool_to_device",
           '  calls("cuCtxPushCurrent")\n    Which is: ', HOST),
    Mutant("cuda_no_source_gate", "../cuda/cuda_streams_test",
           "Streams.APublicationIsReadWhenItsStreamHasComeSoFar", BEFORE_THE_STREAM, DEVICE),
    Mutant("cuda_no_destination_gate", "../cuda/cuda_streams_test",
           "Streams.EarlierUsersOfTheDestinationsSlotsAreDoneFirst", BEFORE_THE_STREAM, DEVICE),
]


def run(program, test, environment):
    command = [program, f"--gtest_filter={test}", "--gtest_brief=1"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True,
                          encoding="utf-8", errors="replace")
    return done.returncode, done.stdout + done.stderr


def what_is_wrong(folder, mutant):
    """None: the test passes, and the deviation fails it as it has to."""
    program = os.path.join(folder, mutant.program)
    code, text = run(program, mutant.test, mutant.environment)
    if code != 0 or "[  PASSED  ] 1 test." not in text:
        return f"without a deviation, {mutant.test} ends with {code}:\n{text}"
    if mutant.deviation == "cuda_attest_early":
        fault = {"KVF_MUTANT": mutant.deviation}
    else:
        faults = [os.environ.get("KVF_FAULT"), f"{mutant.deviation}:on"]
        fault = {"KVF_FAULT": ",".join(filter(None, faults))}
    code, text = run(program, mutant.test, {**mutant.environment, **fault})
    if code == 0:
        return f"{mutant.deviation} survives {mutant.test}"
    if code != 1 or mutant.says not in text:
        return (f"{mutant.deviation}: {mutant.test} ends with {code}, which may have other reasons; "
                f"not said:\n{mutant.says}\nbut:\n{text}")
    print(f"{mutant.deviation}: killed by {mutant.test}")
    return None


def main():
    which, folder = sys.argv[1:]
    wrong = [what_is_wrong(folder, mutant) for mutant in {"cuda": CUDA, "gets": GETS}[which]]
    wrong = [text for text in wrong if text]
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
