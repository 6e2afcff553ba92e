// Statistics of logits for the softmax: a MaxSum per row and set of kSetColumns columns.
#pragma once
constexpr int kSetColumns = 64;
