// Puts one rank's part of a pack together: tokens, targets, loss weights, positions and padding in
// one walk over the documents.

#ifndef HBP_ASSEMBLY_H_
#define HBP_ASSEMBLY_H_

#include <cstdint>

namespace hbp {

// A sequence on its way into a pack: its first `length` tokens, and 1 for each that is trained.
template <typename Token>
struct Source {
  const Token* tokens;
  const uint8_t* mask;
  int64_t length;
};

// A rank's part of a pack, tokens low to low + size. bounds: num_documents + 1 ascending offsets
// from 0 to the pack's length; the first num_sequences documents are sequences, each of which may
// be shorter than its document (alignment); the others are the tail.
struct Part {
  const int32_t* bounds;
  int64_t num_documents;
  int64_t num_sequences;
  int64_t low;
  int64_t size;
};

// Every token's place in its document, and 1 where it belongs to no sequence. lengths:
// num_sequences.
void Layout(const Part& part, const int64_t* lengths, int64_t* positions, uint8_t* padding);

// The tokens of sequences; the rest of a sequence's document repeats the sequence. The tail is left
// alone.
template <typename Token>
void FillTokens(const Part& part, const Source<Token>* sources, int64_t* tokens);

// The target of position p of a sequence is its token p + 1, with the sequence's weight where that
// is trained, else 0; everything else has target 0 and weight 0. Returns how many are trained.
template <typename Token>
int64_t FillTargets(const Part& part, const Source<Token>* sources, const float* weights,
                    int64_t* targets, float* loss_weights);

}  // namespace hbp

#endif  // HBP_ASSEMBLY_H_
