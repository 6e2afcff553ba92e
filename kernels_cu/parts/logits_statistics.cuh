// Statistics of logits for the softmax: a MaxSum per row and set of kSetColumns columns.
constexpr int kSetColumns = 64;
