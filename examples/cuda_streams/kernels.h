// The kernels' bodies, for the device and for the host build that the test double runs.
#pragma once

#ifdef __CUDACC__
#define BOTH __host__ __device__
#else
#define BOTH
#endif

BOTH inline unsigned value(unsigned seed, unsigned i) {
  unsigned x = (seed + 1) * 2654435761u + i * 2246822519u;
  x ^= x >> 15;
  return x * 2654435761u;
}

// `turns` makes a word expensive, as attention and the layers' products do.
BOTH inline unsigned slow_value(unsigned seed, unsigned i, unsigned turns) {
  unsigned x = 0;
  for (unsigned turn = 0; turn < turns; ++turn) x = x * 1664525u + value(seed, i + turn);
  return x == 42u && turns == 0 ? 0 : value(seed, i);
}
