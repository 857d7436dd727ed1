#include "tiny_model.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

namespace disagg::tiny {

namespace {

constexpr double kFeedForwardGain = 3.0;
// Six steps that stretch a difference about 60-fold each: 1e-12 reaches the size of the values.
constexpr int kTailSteps = 7;
constexpr double kTailGain = 60.0;

// The standard fixes mt19937_64's numbers, but not those of its distributions.
Matrix random_matrix(std::mt19937_64& numbers, std::size_t rows, std::size_t columns, double gain) {
  const double scale = gain * std::sqrt(3.0 / static_cast<double>(rows));
  Matrix m(rows * columns);
  for (double& value : m) value = (std::ldexp(static_cast<double>(numbers() >> 11), -52) - 1.0) * scale;
  return m;
}

}  // namespace

LayerKind layer_kind(std::uint32_t layer, bool hybrid) {
  if (!hybrid) return LayerKind::full;
  constexpr LayerKind pattern[] = {LayerKind::full, LayerKind::window, LayerKind::recurrent, LayerKind::window};
  return pattern[layer % 4];
}

Weights make_weights() {
  std::mt19937_64 numbers(kSeed);
  Weights w;
  w.embedding = random_matrix(numbers, kVocabulary, kHidden, std::sqrt(kVocabulary / 3.0));
  w.layers.resize(kLayers);
  for (LayerWeights& layer : w.layers) {
    layer.heads.resize(kHeads);
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      HeadWeights& head = layer.heads[h];
      head.query = random_matrix(numbers, kHidden, kHeadDim, 1.0);
      head.key = random_matrix(numbers, kHidden, kHeadDim, 1.0);
      head.value = random_matrix(numbers, kHidden, kHeadDim, 1.0);
      // A flat average of many values is small; the gain gives it weight in the residual stream.
      head.output = random_matrix(numbers, kHeadDim, kHidden, 2.0);
      head.decay = 1.0 - std::ldexp(1.0, -3 - static_cast<int>(h));
    }
    layer.up = random_matrix(numbers, kHidden, kInner, 1.0);
    layer.down = random_matrix(numbers, kInner, kHidden, 1.0);
  }
  for (int i = 0; i < kTailSteps; ++i) w.tail.push_back(random_matrix(numbers, kHidden, kHidden, 1.0));
  w.logits = random_matrix(numbers, kHidden, kVocabulary, 1.0);
  return w;
}

void multiply_add(const double* x, const Matrix& m, std::size_t rows, std::size_t columns, double* __restrict y) {
  // Row by row: the compiler may compute columns side by side without changing any sum's order.
  for (std::size_t i = 0; i < rows; ++i) {
    const double* row = m.data() + i * columns;
    const double xi = x[i];
    for (std::size_t j = 0; j < columns; ++j) y[j] += xi * row[j];
  }
}

void multiply(const double* x, const Matrix& m, std::size_t rows, std::size_t columns, double* y) {
  std::fill(y, y + columns, 0.0);
  multiply_add(x, m, rows, columns, y);
}

void normalise(double* x, std::size_t n) {
  double sum = 1e-12;
  for (std::size_t i = 0; i < n; ++i) sum += x[i] * x[i];
  const double scale = std::sqrt(static_cast<double>(n) / sum);
  for (std::size_t i = 0; i < n; ++i) x[i] *= scale;
}

void rotate(double* head, std::uint64_t position) {
  for (std::uint32_t i = 0; i < kHeadDim / 2; ++i) {
    const double angle = static_cast<double>(position) * std::pow(10000.0, -2.0 * i / kHeadDim);
    const double c = std::cos(angle), s = std::sin(angle);
    const double a = head[i], b = head[i + kHeadDim / 2];
    head[i] = a * c - b * s;
    head[i + kHeadDim / 2] = a * s + b * c;
  }
}

void attend(const double* query, const double* keys, std::size_t stride, const double* values,
            std::size_t begin, std::size_t count, double* __restrict scratch, double* __restrict out) {
  std::fill(scratch + begin, scratch + count, 0.0);
  for (std::uint32_t d = 0; d < kHeadDim; ++d) {
    const double q = query[d] / std::sqrt(static_cast<double>(kHeadDim));
    const double* row = keys + d * stride;
    for (std::size_t p = begin; p < count; ++p) scratch[p] += q * row[p];
  }
  const double largest = *std::max_element(scratch + begin, scratch + count);
  double sum = 0.0;
  std::fill(out, out + kHeadDim, 0.0);
  for (std::size_t p = begin; p < count; ++p) {
    const double weight = std::exp(scratch[p] - largest);
    sum += weight;
    const double* value = values + p * kHeadDim;
    for (std::uint32_t d = 0; d < kHeadDim; ++d) out[d] += weight * value[d];
  }
  for (std::uint32_t d = 0; d < kHeadDim; ++d) out[d] /= sum;
}

void feed_forward(const LayerWeights& layer, double* x) {
  double n[kHidden], inner[kInner];
  std::copy(x, x + kHidden, n);
  normalise(n, kHidden);
  multiply(n, layer.up, kHidden, kInner, inner);
  for (double& v : inner) v = std::sin(kFeedForwardGain * v);
  multiply_add(inner, layer.down, kInner, kHidden, x);
}

Token choose(const Weights& weights, const double* x) {
  double a[kHidden], b[kHidden], logits[kVocabulary];
  std::copy(x, x + kHidden, a);
  for (const Matrix& m : weights.tail) {
    normalise(a, kHidden);
    for (double& v : a) v = std::sin(kTailGain * v);
    multiply(a, m, kHidden, kHidden, b);
    std::copy(b, b + kHidden, a);
  }
  multiply(a, weights.logits, kHidden, kVocabulary, logits);
  Token best = 0;
  for (std::uint32_t i = 1; i < kVocabulary; ++i)
    if (logits[i] > logits[best]) best = static_cast<Token>(i);
  return best;
}

std::uint16_t to_bf16(double value) {
  const float f = static_cast<float>(value);
  std::uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  bits += 0x7fff + ((bits >> 16) & 1);  // to nearest, ties to even
  return static_cast<std::uint16_t>(bits >> 16);
}

double from_bf16(std::uint16_t half) {
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

}  // namespace disagg::tiny
