// SPDX-License-Identifier: MIT OR Apache-2.0
// The CPU twins of wgmma.cuh. Products and bulk copies complete at once, so a missing wait does not show
// here; the values, the layouts and the barrier protocol do.
#pragma once

DEVFN unsigned char* at_shared(u32 address, size_t bytes) {
  if (address + bytes > emu::dynamic_bytes) emu::fail("shared address past the end of dynamic shared memory");
  return reinterpret_cast<unsigned char*>(emu::dynamic_shared) + address;
}
template <class T>
T read_shared(u32 address) {
  T v;
  memcpy(&v, at_shared(address, sizeof v), sizeof v);
  return v;
}
template <class T>
void write_shared(u32 address, T v) {
  memcpy(at_shared(address, sizeof v), &v, sizeof v);
}

DEVFN u32 shared_address(const void* p) {
  const ptrdiff_t offset = static_cast<const char*>(p) - emu::dynamic_shared;
  if (offset < 0 || static_cast<size_t>(offset) > emu::dynamic_bytes)
    emu::fail("shared_address of something outside dynamic shared memory");
  return static_cast<u32>(offset);
}
DEVFN uint4 shared_load4(u32 address) {
  if (address % 16) emu::fail("misaligned 16-byte shared load");
  return read_shared<uint4>(address);
}
DEVFN void shared_store4(u32 address, uint4 v) {
  if (address % 16) emu::fail("misaligned 16-byte shared store");
  write_shared(address, v);
}
DEVFN u32 shared_load(u32 address) { return read_shared<u32>(address); }
DEVFN u32 shared_add(u32 address, u32 value) {
  const u32 old = read_shared<u32>(address);
  write_shared(address, old + value);
  return old;
}

/// An mbarrier whose every phase has one arrival, the one that announces a copy.
struct EmulatedBarrier {
  u32 phase, expected;
};
DEVFN void mbarrier_init(u32 barrier, u32 arrivals) {
  if (arrivals != 1) emu::fail("the emulated memory barrier has one arrival a phase");
  write_shared(barrier, EmulatedBarrier{0, 0});
}
DEVFN void mbarrier_publish() {}
DEVFN void mbarrier_expect(u32 barrier, u32 bytes) {
  auto b = read_shared<EmulatedBarrier>(barrier);
  b.expected += bytes;
  write_shared(barrier, b);
}
DEVFN void mbarrier_wait(u32 barrier, u32 parity) {
  while ((read_shared<EmulatedBarrier>(barrier).phase & 1) == parity) emu::yield(emu::RUNNABLE);
}
DEVFN void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  if (bytes % 16 || to % 16 || reinterpret_cast<uintptr_t>(from) % 16)
    emu::fail("bulk copy: address or size is no multiple of 16");
  memcpy(at_shared(to, bytes), from, bytes);
  auto b = read_shared<EmulatedBarrier>(barrier);
  if (b.expected < bytes) emu::fail("bulk copy of more bytes than its barrier expects");
  b.expected -= bytes;
  if (b.expected == 0) b.phase++;
  write_shared(barrier, b);
}

DEVFN void named_count(int barrier, unsigned threads) {
  auto& b = emu::named_barriers[barrier];
  if (++b.arrived == threads) {
    b.arrived = 0;
    b.generation++;
  }
}
template <int THREADS>
DEVFN void named_arrive(int barrier) {
  named_count(barrier, THREADS);
}
template <int THREADS>
DEVFN void named_sync(int barrier) {
  const unsigned generation = emu::named_barriers[barrier].generation;
  named_count(barrier, THREADS);
  while (emu::named_barriers[barrier].generation == generation) emu::yield(emu::RUNNABLE);
}

DEVFN void wgmma_fence() {}
DEVFN void wgmma_commit() {}
template <int PENDING>
DEVFN void wgmma_wait() {}
template <int N>
DEVFN void wgmma_hold(float (&)[N][4]) {}

template <int SIGN, int N>
DEVFN void wgmma_accumulate(float (&d)[N][4], const u32 (&a)[4], u64 b, int keep) {
  const unsigned g = emu::lane() >> 2, t = emu::lane() & 3;
  memcpy(emu::slot(emu::lane()), a, sizeof a);
  __syncwarp();
  const u32 base = static_cast<u32>(b & 0x3fff) << 4, k_stride = static_cast<u32>(b >> 16 & 0x3fff) << 4,
            n_stride = static_cast<u32>(b >> 32 & 0x3fff) << 4;
  for (unsigned j = 0; j < N; ++j)
    for (unsigned q = 0; q < 4; ++q) {
      const unsigned row = g + (q >> 1) * 8, column = 2 * t + (q & 1);
      double product[16];
      for (unsigned k = 0; k < 16; ++k) {
        const u32 where = base + j * n_stride + (k >> 3) * k_stride + column * 16 + (k & 7) * 2;
        product[k] = SIGN * fragment_a(row, k) * half_to_float(read_shared<u16>(where));
      }
      d[j][q] = tensor_sum(keep ? d[j][q] : 0.0f, product, 16);
    }
  __syncwarp();
}
