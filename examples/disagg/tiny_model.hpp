// The arithmetic of the tiny engine: a transformer with seeded weights. It knows no cache layout.
//
// Two properties matter here and shape everything:
//  - Bit-identical results however heads and layers are spread over ranks: heads are computed one by
//    one, every sum runs in one fixed order, and the result does not depend on how many tokens are
//    computed together.
//  - Every cached bit counts: attention is flat (no key is ignored) and the last steps before the
//    logits are a chaotic map, so that a difference of 1e-12 becomes another token. A trained model
//    would forgive a wrong byte; this one is a detector.
#pragma once

#include "engine.hpp"

#include <cstdint>
#include <vector>

namespace disagg::tiny {

constexpr std::uint32_t kLayers = 8;
constexpr std::uint32_t kHeads = 8;
constexpr std::uint32_t kHeadDim = 32;
constexpr std::uint32_t kHidden = 128;
constexpr std::uint32_t kInner = 256;
constexpr std::uint32_t kVocabulary = 256;  // one token per byte of text
constexpr std::uint32_t kWindow = 128;
constexpr std::uint64_t kSeed = 0x6b766665727279;

enum class LayerKind { full, window, recurrent };
// Without `hybrid` every layer is full attention.
LayerKind layer_kind(std::uint32_t layer, bool hybrid);

using Matrix = std::vector<double>;  // [rows][columns], y = x * M

struct HeadWeights {
  Matrix query, key, value;  // [kHidden][kHeadDim]
  Matrix output;             // [kHeadDim][kHidden]
  double decay;              // recurrent layers only
};

struct LayerWeights {
  std::vector<HeadWeights> heads;
  Matrix up, down;  // [kHidden][kInner], [kInner][kHidden]
};

struct Weights {
  Matrix embedding;               // [kVocabulary][kHidden]
  std::vector<LayerWeights> layers;
  std::vector<Matrix> tail;       // [kHidden][kHidden] each
  Matrix logits;                  // [kHidden][kVocabulary]
};

Weights make_weights();

// y[0..columns) = or += x[0..rows) * m
void multiply(const double* x, const Matrix& m, std::size_t rows, std::size_t columns, double* y);
void multiply_add(const double* x, const Matrix& m, std::size_t rows, std::size_t columns, double* y);
// Scales x so that its mean square is 1.
void normalise(double* x, std::size_t n);
// Rotates pairs of a head by the position.
void rotate(double* head, std::uint64_t position);

// Attention of one query over `count` keys and values. keys is [kHeadDim][stride], values is
// [count][kHeadDim]; `begin` is the first key attended to. `scratch` has room for `count`.
void attend(const double* query, const double* keys, std::size_t stride, const double* values,
            std::size_t begin, std::size_t count, double* scratch, double* out);

// x += MLP(x)
void feed_forward(const LayerWeights& layer, double* x);
// The most likely token after the last hidden state.
Token choose(const Weights& weights, const double* x);

// The cache holds bfloat16.
std::uint16_t to_bf16(double value);
double from_bf16(std::uint16_t bits);

}  // namespace disagg::tiny
