#include "assembly.h"

#include <algorithm>

namespace hbp {

namespace {

// Calls visit(document, its begin, first, last) for the documents that meet the part; first and
// last are tokens of the pack, inside the part.
template <typename Visit>
void ForDocuments(const Part& part, int64_t num, const Visit& visit) {
  const int64_t high = part.low + part.size;
  const int32_t* end = part.bounds + num + 1;
  int64_t document = std::upper_bound(part.bounds, end, part.low) - part.bounds - 1;
  for (; document < num && part.bounds[document] < high; ++document) {
    const int64_t begin = part.bounds[document];
    const int64_t first = std::max<int64_t>(begin, part.low);
    const int64_t last = std::min<int64_t>(part.bounds[document + 1], high);
    visit(document, begin, first, last);
  }
}

}  // namespace

void Layout(const Part& part, const int64_t* lengths, int64_t* positions, uint8_t* padding) {
  ForDocuments(part, part.num_documents,
               [&](int64_t document, int64_t begin, int64_t first, int64_t last) {
                 int64_t* to = positions + (first - part.low);
                 for (int64_t i = 0; i < last - first; ++i) to[i] = first - begin + i;
                 const int64_t length = document < part.num_sequences ? lengths[document] : 0;
                 const int64_t real = std::clamp(begin + length, first, last);
                 uint8_t* mask = padding - part.low;
                 std::fill(mask + first, mask + real, uint8_t{0});
                 std::fill(mask + real, mask + last, uint8_t{1});
               });
}

template <typename Token>
void FillTokens(const Part& part, const Source<Token>* sources, int64_t* tokens) {
  ForDocuments(part, part.num_sequences,
               [&](int64_t document, int64_t begin, int64_t first, int64_t last) {
                 const Source<Token>& source = sources[document];
                 int64_t at = first;
                 const int64_t real = std::min(last, begin + source.length);
                 for (; at < real; ++at) tokens[at - part.low] = source.tokens[at - begin];
                 for (; at < last; ++at) {
                   tokens[at - part.low] = source.tokens[(at - begin) % source.length];
                 }
               });
}

template <typename Token>
int64_t FillTargets(const Part& part, const Source<Token>* sources, const float* weights,
                    int64_t* targets, float* loss_weights) {
  int64_t num_trained = 0;
  ForDocuments(
      part, part.num_documents, [&](int64_t document, int64_t begin, int64_t first, int64_t last) {
        int64_t* target = targets + (first - part.low);
        float* loss_weight = loss_weights + (first - part.low);
        int64_t count = 0;
        if (document < part.num_sequences) {
          const Source<Token>& source = sources[document];
          count = std::clamp<int64_t>(begin + source.length - 1 - first, 0, last - first);
          const Token* from = source.tokens + (first - begin) + 1;
          const uint8_t* mask = source.mask + (first - begin) + 1;
          const float weight = weights[document];
          for (int64_t i = 0; i < count; ++i) target[i] = from[i];
          for (int64_t i = 0; i < count; ++i) {
            loss_weight[i] = mask[i] != 0 ? weight : 0.0f;
          }
          num_trained +=
              std::count_if(mask, mask + count, [](uint8_t trained) { return trained != 0; });
        }
        std::fill(target + count, target + (last - first), int64_t{0});
        std::fill(loss_weight + count, loss_weight + (last - first), 0.0f);
      });
  return num_trained;
}

template void FillTokens(const Part&, const Source<uint16_t>*, int64_t*);
template void FillTokens(const Part&, const Source<int32_t>*, int64_t*);
template int64_t FillTargets(const Part&, const Source<uint16_t>*, const float*, int64_t*, float*);
template int64_t FillTargets(const Part&, const Source<int32_t>*, const float*, int64_t*, float*);

}  // namespace hbp
