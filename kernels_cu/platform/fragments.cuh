// Matrix fragments: declarations that all targets share.
#pragma once

// A lane's part of 16 rows of A (16 columns of B) x kFragmentK<T> of k.
enum Side { kSideA, kSideB };
template <class T, Side kSide> struct Fragment;
template <class T> using FragmentA = Fragment<T, kSideA>;
template <class T> using FragmentB = Fragment<T, kSideB>;
// The order of k over lanes.  kPairs is the matrix unit's order; kFours and kEights, for mixed
// input, give a lane 4 or 8 adjacent elements.  Any order of k is valid if A and B share it.
enum class LaneOrder { kPairs, kFours, kEights };
template <class T> constexpr int kFragmentK = 32 / int(sizeof(T));

// A lane's part of 16 x 16 accumulators of products of T; value i is at row(lane, i), col(lane, i).
template <class T> struct Accumulator;
// A lane's part of 8 columns of B x 16 of k, and of 16 x 8 accumulators.  Only on NVIDIA and the
// host, for 16-bit elements.
template <class T> struct NarrowFragment;
template <class T> struct NarrowAccumulator;
