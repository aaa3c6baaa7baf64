// SPDX-License-Identifier: MIT OR Apache-2.0
// The CPU twins of prims.cuh.
#pragma once

template <int BYTES>
DEVFN void cp_async(void* to, const void* from) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  if (reinterpret_cast<uintptr_t>(to) % BYTES || reinterpret_cast<uintptr_t>(from) % BYTES)
    emu::fail("cp.async: misaligned address");
  emu::current->open.push_back({to, from, BYTES});
}
DEVFN void cp_async_commit() {
  emu::current->groups.push_back(std::move(emu::current->open));
  emu::current->open.clear();
}
template <int PENDING>
DEVFN void cp_async_wait() {
  auto& groups = emu::current->groups;
  while (groups.size() > PENDING) {
    for (auto& copy : groups.front()) memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
    groups.erase(groups.begin());
  }
}

DEVFN float half_to_float(u32 bits) { return static_cast<float>(emu_bits<_Float16>(static_cast<u16>(bits))); }
DEVFN u32 float_to_half(float x) { return emu_bits<u16>(static_cast<_Float16>(x)); }
DEVFN u32 pack_half2(float low, float high) { return float_to_half(low) | float_to_half(high) << 16; }
DEVFN void unpack_half2(u32 pair, float& low, float& high) {
  low = half_to_float(pair & 0xffff);
  high = half_to_float(pair >> 16);
}

/// c plus n products, as the tensor core of `emu::tensor_model` adds them.
DEVFN float tensor_sum(float c, const double* product, int n) {
  if (emu::tensor_model == 0) {
    for (int i = 0; i < n; ++i) c = static_cast<float>(static_cast<double>(c) + product[i]);
    return c;
  }
  int largest = -1000;
  if (c != 0) largest = ilogb(c);
  for (int i = 0; i < n; ++i)
    if (product[i] != 0) largest = std::max(largest, ilogb(product[i]));
  if (largest == -1000) return 0;
  const double up = ldexp(1.0, 25 - largest), down = ldexp(1.0, largest - 25);
  double sum = trunc(c * up);
  for (int i = 0; i < n; ++i) sum += trunc(product[i] * up);
  sum *= down;
  float rounded = static_cast<float>(sum);
  if (fabs(static_cast<double>(rounded)) > fabs(sum)) rounded = nextafterf(rounded, 0.0f);
  return rounded;
}

/// Element (row, k) of a 16 x 16 fragment that the warp's lanes left in their mailboxes.
DEVFN double fragment_a(unsigned row, unsigned k) {
  const u32* a = static_cast<const u32*>(emu::slot((row & 7) * 4 + ((k & 7) >> 1)));
  return half_to_float(a[(row >> 3) + 2 * (k >> 3)] >> (16 * (k & 1)) & 0xffff);
}

DEVFN void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const unsigned g = emu::lane() >> 2, t = emu::lane() & 3;
  memcpy(emu::slot(emu::lane()), own, sizeof own);
  __syncwarp();
  for (unsigned q = 0; q < 4; ++q) {
    const unsigned row = g + (q >> 1) * 8, col = 2 * t + (q & 1);
    double product[16];
    for (unsigned k = 0; k < 16; ++k) {
      const u32* b = static_cast<const u32*>(emu::slot(col * 4 + ((k & 7) >> 1))) + 4;
      product[k] = fragment_a(row, k) * half_to_float(b[k >> 3] >> (16 * (k & 1)) & 0xffff);
    }
    d[q] = tensor_sum(d[q], product, 16);
  }
  __syncwarp();
}

DEVFN void load_matrices(u32 (&r)[4], const void* row, bool transposed) {
  if (reinterpret_cast<uintptr_t>(row) % 16) emu::fail("ldmatrix: misaligned row");
  memcpy(emu::slot(emu::lane()), row, 16);
  __syncwarp();
  const unsigned g = emu::lane() >> 2, t = emu::lane() & 3;
  for (unsigned m = 0; m < 4; ++m) {
    auto element = [&](unsigned i, unsigned j) -> u32 {
      if (transposed) std::swap(i, j);
      return static_cast<const u16*>(emu::slot(8 * m + i))[j];
    };
    r[m] = element(g, 2 * t) | element(g, 2 * t + 1) << 16;
  }
  __syncwarp();
}
DEVFN void ldmatrix_x4(u32 (&r)[4], const void* row) { load_matrices(r, row, false); }
DEVFN void ldmatrix_x4_transposed(u32 (&r)[4], const void* row) { load_matrices(r, row, true); }
