// What a product leaves of logits for the softmax: of every row, and of every set of kSetColumns columns,
// a MaxSum.
constexpr int kSetColumns = 64;
