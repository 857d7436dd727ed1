// What orders what: streams of the engine, kvferry's copies, and the streams that wait for them.
#include "gpu.hpp"

namespace {

using namespace kvferry_test;

const Ints kFrom{3, 9}, kTo{5, 6};

// A slow device: whatever is not waited for comes too late.
class Streams : public testing::Test {
 protected:
  void TearDown() override { OF_DOUBLE(kvf_cuda_double_delay)(0, 200); }
  static void slow(std::uint32_t ms) { OF_DOUBLE(kvf_cuda_double_delay)(ms * 1000, ms * 1000); }
};

TEST_F(Streams, APublicationIsReadWhenItsStreamHasComeSoFar) {
  Gpu gpu;
  Stream stream;
  stream.hold();
  stream.set(Gpu::block(gpu.source, 3), 0x33, Cache::block);
  stream.set(Gpu::block(gpu.source, 9), 0x99, Cache::block);
  auto publication = gpu.publish_behind(stream, 1, kFrom, 8);
  auto transfer = gpu.sink.agent.pull_begin(gpu.peer, publication.ticket(), 0, kTo);
  linger();
  EXPECT_EQ(transfer.poll(), KVF_IN_PROGRESS);
  EXPECT_EQ(peek(Gpu::block(gpu.sink, 5), Cache::block), bytes_of(0, Cache::block));
  stream.release();
  ASSERT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
  EXPECT_EQ(gpu.sink.block(0, 5), bytes_of(0x33, Cache::block));
  EXPECT_EQ(gpu.sink.block(0, 6), bytes_of(0x99, Cache::block));
  EXPECT_EQ(publication.wait(kLong), KVF_OK);
}

TEST_F(Streams, WhatIsEnqueuedAfterwardsIsNotWaitedFor) {
  Gpu gpu;
  Stream stream, behind;
  behind.hold();
  auto publication = gpu.publish_behind(behind, 2, {1}, 4);
  auto first = gpu.publish_behind(stream, 1, kFrom, 8);
  // Its own stream is free, whatever another publication waits for.
  auto transfer = gpu.sink.agent.pull_begin(gpu.peer, first.ticket(), 0, kTo);
  EXPECT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
  auto held = gpu.sink.agent.pull_begin(gpu.peer, publication.ticket(), 0, Ints{7});
  linger();
  EXPECT_EQ(held.poll(), KVF_IN_PROGRESS);
  behind.release();
  EXPECT_EQ(held.wait(kLong), KVF_OK) << held.error_text();
}

TEST_F(Streams, APushIsReadWhenItsStreamHasComeSoFar) {
  Gpu gpu;
  auto back = gpu.source.agent.add_peer(gpu.sink.engine.metadata());
  kvferry::check(back.wait(kLong));
  Stream stream;
  stream.hold();
  stream.set(Gpu::block(gpu.source, 3), 0x33, Cache::block);
  kvferry::Receive receive;
  receive.key = kvferry::key(3);
  const Ints to{5}, from{3};
  receive.groups = {kvferry::wanted(0, to, 0, 4)};
  auto in = gpu.sink.agent.receive_begin(receive);
  kvferry::Push push;
  push.groups = {kvferry::published(0, from, 0, 4)};
  push.stream = stream.c();
  auto out = gpu.source.agent.push_begin(back, in.offer(), push);
  linger();
  EXPECT_EQ(in.poll(), KVF_IN_PROGRESS);
  stream.release();
  ASSERT_EQ(in.wait(kLong), KVF_OK) << in.error_text();
  EXPECT_EQ(out.wait(kLong), KVF_OK) << out.error_text();
  EXPECT_EQ(gpu.sink.block(0, 5), bytes_of(0x33, Cache::block));
}

TEST_F(Streams, EarlierUsersOfTheDestinationsSlotsAreDoneFirst) {
  Gpu gpu;
  auto publication = gpu.publish(1, kFrom, 8);
  Stream stream;
  stream.hold();
  stream.set(Gpu::block(gpu.sink, 5), 0xee, Cache::block);  // would be the last to write
  auto transfer = gpu.pull_behind(stream.c(), publication.ticket(), kTo);
  linger();
  EXPECT_EQ(transfer.poll(), KVF_IN_PROGRESS);
  EXPECT_EQ(peek(Gpu::block(gpu.sink, 6), Cache::block), bytes_of(0, Cache::block));
  stream.release();
  ASSERT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
  stream.synchronize();
  EXPECT_EQ(gpu.sink.block(0, 5), gpu.source.block(0, 3));
  EXPECT_EQ(gpu.sink.block(0, 6), gpu.source.block(0, 9));
}

TEST_F(Streams, AReceivesSlotsAreWrittenBehindItsStream) {
  Gpu gpu;
  auto back = gpu.source.agent.add_peer(gpu.sink.engine.metadata());
  kvferry::check(back.wait(kLong));
  Stream stream;
  stream.hold();
  stream.set(Gpu::block(gpu.sink, 5), 0xee, Cache::block);
  kvferry::Receive receive;
  receive.key = kvferry::key(3);
  const Ints to{5}, from{3};
  receive.groups = {kvferry::wanted(0, to, 0, 4)};
  receive.stream = stream.c();
  auto in = gpu.sink.agent.receive_begin(receive);
  kvferry::Push push;
  push.groups = {kvferry::published(0, from, 0, 4)};
  auto out = gpu.source.agent.push_begin(back, in.offer(), push);
  linger();
  EXPECT_EQ(in.poll(), KVF_IN_PROGRESS);
  stream.release();
  ASSERT_EQ(in.wait(kLong), KVF_OK) << in.error_text();
  stream.synchronize();
  EXPECT_EQ(gpu.sink.block(0, 5), gpu.source.block(0, 3));
}

TEST_F(Streams, ADoneTransfersBytesAreThere) {
  Gpu gpu;
  auto publication = gpu.publish(1, kFrom, 8);
  slow(100);
  auto transfer = gpu.sink.agent.pull_begin(gpu.peer, publication.ticket(), 0, kTo);
  ASSERT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
  const auto now = peek(Gpu::block(gpu.sink, 5), Cache::block);  // waits for no stream
  EXPECT_EQ(now, gpu.source.block(0, 3));
}

TEST_F(Streams, ACancelledTransferIsSafeOnlyWhenItsCopyIsOver) {
  Gpu gpu;
  auto publication = gpu.publish(1, kFrom, 8);
  slow(300);
  auto transfer = gpu.sink.agent.pull_begin(gpu.peer, publication.ticket(), 0, kTo);
  while (transfer.query().submitted == 0 && transfer.poll() == KVF_IN_PROGRESS) {
  }
  linger();
  transfer.cancel();
  EXPECT_EQ(transfer.wait(kLong), KVF_ERR_CANCELLED);
  if (transfer.query().memory_safe == 0) {
    EXPECT_GE(gpu.sink.agent.quarantine().size(), 1u);
  }
  EXPECT_TRUE(safe_soon(transfer));
  const auto then = peek(Gpu::block(gpu.sink, 5), Cache::block);
  slow(0);
  linger();
  linger();
  EXPECT_EQ(peek(Gpu::block(gpu.sink, 5), Cache::block), then) << "written after it was safe";
}

TEST_F(Streams, ADeadlineEndsTheWaitForAStream) {
  Gpu gpu;
  auto publication = gpu.publish(1, kFrom, 8);
  Stream stream;
  stream.hold();
  auto transfer = gpu.pull_behind(stream.c(), publication.ticket(), kTo, 200ms);
  EXPECT_EQ(transfer.wait(kLong), KVF_ERR_DEADLINE);
  EXPECT_TRUE(safe_soon(transfer));
  EXPECT_EQ(peek(Gpu::block(gpu.sink, 5), Cache::block), bytes_of(0, Cache::block));
}

TEST_F(Streams, AStreamThatWaitsGoesOnAfterSuccess) {
  Gpu gpu;
  Stream producer, consumer;
  producer.hold();
  producer.set(Gpu::block(gpu.source, 3), 0x33, Cache::block);
  auto publication = gpu.publish_behind(producer, 1, kFrom, 8);
  auto transfer = gpu.sink.agent.pull_begin(gpu.peer, publication.ticket(), 0, kTo);
  transfer.stream_wait(consumer.c());
  consumer.set(Gpu::block(gpu.sink, 5), 0x11, Cache::block);  // the next user of the slot
  linger();
  EXPECT_FALSE(consumer.idle());
  EXPECT_EQ(peek(Gpu::block(gpu.sink, 5), Cache::block), bytes_of(0, Cache::block));
  producer.release();
  ASSERT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
  consumer.synchronize();
  EXPECT_EQ(gpu.sink.block(0, 5), bytes_of(0x11, Cache::block));
  transfer.stream_wait(consumer.c());  // has ended: nothing to wait for
  consumer.synchronize();
}

TEST_F(Streams, AStreamThatWaitsGoesOnAfterFailureAndAtTheDeadline) {
  Gpu gpu;
  Stream producer, first, second;
  producer.hold();
  auto publication = gpu.publish_behind(producer, 1, kFrom, 8);
  auto cancelled = gpu.sink.agent.pull_begin(gpu.peer, publication.ticket(), 0, Ints{5, 6});
  cancelled.stream_wait(first.c());
  auto late = gpu.pull_behind(nullptr, publication.ticket(), Ints{7, 8}, 300ms);
  late.stream_wait(second.c());
  EXPECT_FALSE(first.idle());
  cancelled.cancel();
  first.synchronize();
  EXPECT_EQ(cancelled.wait(kLong), KVF_ERR_CANCELLED);
  second.synchronize();
  EXPECT_EQ(late.wait(kLong), KVF_ERR_DEADLINE);
}

TEST_F(Streams, AStreamThatWaitsGoesOnWhenTheAgentEnds) {
  Stream consumer;
  {
    Gpu gpu;
    Stream producer;
    producer.hold();
    auto publication = gpu.publish_behind(producer, 1, kFrom, 8);
    auto transfer = gpu.sink.agent.pull_begin(gpu.peer, publication.ticket(), 0, kTo);
    transfer.stream_wait(consumer.c());
    EXPECT_EQ(gpu.sink.agent.destroy(kLong), KVF_OK);
    consumer.synchronize();
  }
}

TEST_F(Streams, ManyTransfersShareFewWords) {
  Gpu gpu;
  Stream consumer;
  for (int i = 0; i < 50; ++i) {
    auto publication = gpu.publish(100 + i, kFrom, 8);
    auto transfer = gpu.sink.agent.pull_begin(gpu.peer, publication.ticket(), 0, kTo);
    transfer.stream_wait(consumer.c());
    consumer.synchronize();
    EXPECT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
  }
  EXPECT_LE(books().pinned_registrations, 2u);
}

TEST_F(Streams, TheDefaultStreamsHaveNamesAndNullIsNone) {
  Gpu gpu;
  Cuda::get().enter();
  for (std::uintptr_t name : {std::uintptr_t{KVF_STREAM_LEGACY}, std::uintptr_t{KVF_STREAM_PER_THREAD}}) {
    auto* stream = reinterpret_cast<CUstream>(name);
    Cuda::check(OF_DOUBLE(kvf_cuda_double_hold)(stream), "hold");
    Cuda::check(Cuda::get().set_async(Gpu::block(gpu.source, 3), 0x33, Cache::block, stream), "set");
    kvferry::Offer offer;
    offer.key = kvferry::key(name);
    offer.groups = {kvferry::published(0, kFrom, 0, 8)};
    offer.stream = stream;
    auto publication = gpu.source.agent.publish(offer);
    auto transfer = gpu.sink.agent.pull_begin(gpu.peer, publication.ticket(), 0, kTo);
    linger();
    EXPECT_EQ(transfer.poll(), KVF_IN_PROGRESS) << name;
    Cuda::check(OF_DOUBLE(kvf_cuda_double_release)(stream), "release");
    EXPECT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
    EXPECT_EQ(gpu.sink.block(0, 5), bytes_of(0x33, Cache::block));
  }
  auto publication = gpu.publish(9, kFrom, 8);
  auto transfer = gpu.sink.agent.pull_begin(gpu.peer, publication.ticket(), 0, kTo);
  EXPECT_REFUSED(kvf_transfer_stream_wait(transfer.c(), nullptr), KVF_ERR_INVALID_ARGUMENT,
                 "KVF_STREAM_LEGACY");
  // A thread without a context has no default stream.
  std::thread([&] {
    EXPECT_REFUSED(
        kvf_transfer_stream_wait(transfer.c(), reinterpret_cast<void*>(KVF_STREAM_LEGACY)),
        KVF_ERR_INVALID_ARGUMENT, "this thread has none");
  }).join();
  EXPECT_EQ(transfer.wait(kLong), KVF_OK);
}

TEST_F(Streams, WhatIsNoStreamOfThePoolsIsRefused) {
  Gpu gpu;
  auto publication = gpu.publish(1, kFrom, 8);
  kvf_pull_desc desc = KVF_PULL_DESC_INIT;
  const kvferry::Bytes ticket = publication.ticket();
  desc.peer = gpu.peer.c();
  desc.ticket = ticket.data();
  desc.ticket_bytes = ticket.size();
  desc.slots = kTo.data();
  desc.num_slots = kTo.size();
  desc.token_end = 8;
  kvf_transfer* out = nullptr;
  int none = 0;
  desc.stream = &none;
  EXPECT_REFUSED(kvf_pull_begin(gpu.sink.agent.c(), &desc, &out), KVF_ERR_INVALID_ARGUMENT,
                 "is no stream");
  // A stream of another context.
  CUcontext other = nullptr;
  Cuda::check(OF_DOUBLE(cuCtxCreate_v2)(&other, 0, 0), "cuCtxCreate");
  CUstream foreign = nullptr;
  Cuda::check(Cuda::get().stream_create(&foreign, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  desc.stream = foreign;
  EXPECT_REFUSED(kvf_pull_begin(gpu.sink.agent.c(), &desc, &out), KVF_ERR_INVALID_ARGUMENT,
                 "in which none of the pools concerned");
  (void)Cuda::get().stream_destroy(foreign);
  Cuda::check(OF_DOUBLE(cuCtxDestroy_v2)(other), "cuCtxDestroy");
  // One that is being captured.
  Stream stream;
  OF_DOUBLE(kvf_cuda_double_fail)("cuStreamIsCapturing:1=906");
  desc.stream = stream.c();
  EXPECT_REFUSED(kvf_pull_begin(gpu.sink.agent.c(), &desc, &out), KVF_ERR_UNSUPPORTED, "906");
  EXPECT_EQ(out, nullptr);
  desc.stream = stream.c();
  EXPECT_EQ(kvf_pull_begin(gpu.sink.agent.c(), &desc, &out), KVF_OK) << kvferry::last_error();
  EXPECT_EQ(kvf_transfer_wait(out, 20'000'000'000), KVF_OK);
  EXPECT_EQ(kvf_transfer_destroy(out), KVF_OK);
}

TEST_F(Streams, ACapturedStreamIsRefusedByEveryCall) {
  Gpu gpu;
  auto back = gpu.source.agent.add_peer(gpu.sink.engine.metadata());
  kvferry::check(back.wait(kLong));
  Stream stream;
  kvferry::Offer offer;
  offer.key = kvferry::key(1);
  offer.groups = {kvferry::published(0, kFrom, 0, 8)};
  offer.stream = stream.c();
  kvferry::Receive receive;
  receive.key = kvferry::key(3);
  receive.groups = {kvferry::wanted(0, kTo, 0, 8)};
  auto in = gpu.sink.agent.receive_begin(receive);
  receive.key = kvferry::key(4);
  receive.groups = {kvferry::wanted(0, Ints{7, 8}, 0, 8)};
  receive.stream = stream.c();
  kvferry::Push push;
  push.groups = {kvferry::published(0, kFrom, 0, 8)};
  push.stream = stream.c();
  auto publication = gpu.publish(2, kFrom, 8);
  Stream held;
  held.hold();
  held.set(Gpu::block(gpu.source, 1), 1, 1);
  auto unreadable = gpu.publish_behind(held, 5, {1}, 4);
  auto transfer = gpu.sink.agent.pull_begin(gpu.peer, unreadable.ticket(), 0, Ints{1});

  Cuda::check(OF_DOUBLE(kvf_cuda_double_capture)(stream.raw(), 1), "capture");
  const auto refused = [](auto call) {
    try {
      call();
      ADD_FAILURE() << "not refused";
    } catch (const kvferry::Error& e) {
      EXPECT_EQ(e.status(), KVF_ERR_UNSUPPORTED) << e.what();
      EXPECT_NE(std::string(e.what()).find("is being captured into a graph"), std::string::npos)
          << e.what();
    }
  };
  refused([&] { (void)gpu.source.agent.publish(offer); });
  refused([&] { (void)gpu.pull_behind(stream.c(), publication.ticket(), Ints{7, 8}); });
  refused([&] { (void)gpu.sink.agent.receive_begin(receive); });
  refused([&] { (void)gpu.source.agent.push_begin(back, in.offer(), push); });
  refused([&] { transfer.stream_wait(stream.c()); });
  // Nothing was lost by it.
  Cuda::check(OF_DOUBLE(kvf_cuda_double_capture)(stream.raw(), 0), "capture");
  transfer.stream_wait(stream.c());
  held.release();
  EXPECT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
  auto out = gpu.source.agent.push_begin(back, in.offer(), push);
  EXPECT_EQ(in.wait(kLong), KVF_OK) << in.error_text();
  EXPECT_EQ(out.wait(kLong), KVF_OK) << out.error_text();
}

TEST_F(Streams, TheDefaultStreamsWaitForTransfers) {
  Gpu gpu;
  Cuda::get().enter();
  for (std::uintptr_t name : {std::uintptr_t{KVF_STREAM_LEGACY}, std::uintptr_t{KVF_STREAM_PER_THREAD}}) {
    auto* stream = reinterpret_cast<CUstream>(name);
    Stream producer;
    producer.hold();
    producer.set(Gpu::block(gpu.source, 3), 0x33, Cache::block);
    auto publication = gpu.publish_behind(producer, name, kFrom, 8);
    auto transfer = gpu.sink.agent.pull_begin(gpu.peer, publication.ticket(), 0, kTo);
    transfer.stream_wait(stream);
    Cuda::check(Cuda::get().set_async(Gpu::block(gpu.sink, 5), 0x11, Cache::block, stream), "set");
    linger();
    EXPECT_EQ(Cuda::get().stream_query(stream), CUDA_ERROR_NOT_READY) << name;
    producer.release();
    ASSERT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
    Cuda::check(Cuda::get().stream_synchronize(stream), "cuStreamSynchronize");
    EXPECT_EQ(gpu.sink.block(0, 5), bytes_of(0x11, Cache::block));
    EXPECT_EQ(gpu.sink.block(0, 6), gpu.source.block(0, 9));
  }
}

TEST_F(Streams, ADeviceWithoutMemoryOperationsSaysSo) {
  Gpu gpu;
  Stream producer, consumer;
  producer.hold();
  auto publication = gpu.publish_behind(producer, 1, kFrom, 8);
  auto transfer = gpu.sink.agent.pull_begin(gpu.peer, publication.ticket(), 0, kTo);
  OF_DOUBLE(kvf_cuda_double_fail)("cuStreamWaitValue32:1=801");
  EXPECT_REFUSED(kvf_transfer_stream_wait(transfer.c(), consumer.c()), KVF_ERR_UNSUPPORTED,
                 "no stream memory operations");
  consumer.synchronize();
  producer.release();
  EXPECT_EQ(transfer.wait(kLong), KVF_OK);
}

TEST_F(Streams, TheCallersContextIsAsItWas) {
  const auto depth = OF_DOUBLE(kvf_cuda_double_stack_depth);
  Cuda::get().enter();
  const std::size_t before = depth();
  Gpu gpu;
  Stream stream;
  stream.hold();
  EXPECT_EQ(depth(), before) << "registering";
  auto publication = gpu.publish_behind(stream, 1, kFrom, 8);
  EXPECT_EQ(depth(), before) << "publishing";
  auto transfer = gpu.pull_behind(stream.c(), publication.ticket(), kTo);
  EXPECT_EQ(depth(), before) << "pulling";
  transfer.stream_wait(stream.c());
  EXPECT_EQ(depth(), before) << "waiting";
  stream.release();
  EXPECT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
  CUcontext current = nullptr;
  Cuda::check(OF_DOUBLE(cuCtxGetCurrent)(&current), "cuCtxGetCurrent");
  EXPECT_EQ(current, Cuda::get().context());
}

TEST_F(Streams, AContextThatFailsEndsWhatWaitsForItsStreams) {
  Gpu gpu;
  Stream stream;
  stream.hold();
  auto publication = gpu.publish_behind(stream, 1, kFrom, 8);
  auto transfer = gpu.sink.agent.pull_begin(gpu.peer, publication.ticket(), 0, kTo);
  linger();
  OF_DOUBLE(kvf_cuda_double_fail_context)(Cuda::get().context(), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_REFUSED(publication.wait(kLong), KVF_ERR_TRANSFER, "700");
  EXPECT_NE(transfer.wait(kLong), KVF_OK);
  EXPECT_TRUE(safe_soon(transfer)) << "no byte of it was ever copied";
}

TEST_F(Streams, ACopyWhoseContextFailsLeavesItsSlotsInQuarantine) {
  Gpu gpu;
  auto publication = gpu.publish(1, kFrom, 8);
  slow(300);
  auto transfer = gpu.sink.agent.pull_begin(gpu.peer, publication.ticket(), 0, kTo);
  while (transfer.query().submitted == 0) std::this_thread::sleep_for(1ms);
  linger();
  OF_DOUBLE(kvf_cuda_double_fail_context)(Cuda::get().context(), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(transfer.wait(kLong), KVF_ERR_TRANSFER) << transfer.error_text();
  EXPECT_NE(transfer.error_text().find("has failed"), std::string::npos) << transfer.error_text();
  linger();
  EXPECT_EQ(transfer.query().memory_safe, 0u);
  EXPECT_EQ(gpu.sink.agent.quarantine().size(), 2u);
}

}  // namespace
