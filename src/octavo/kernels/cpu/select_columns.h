// Columns of rows, in another order: for weights whose groups of inputs are not made of neighbors.
#pragma once

#include <cstdint>

#include "ops.h"

namespace octavo {

// out[t, j] = x[t, order[j]], or 0 where order[j] is -1. x is [T, K], out is [T, J].
struct SelectColumnsArgs {
  RowsArgs rows;
  const std::int32_t* order;  // [J], -1 ... K - 1
  std::int64_t num_columns;   // J
  void* out;
};

template <class Element>
void select_columns(const SelectColumnsArgs& args, Pool& pool);

extern template void select_columns<bf16>(const SelectColumnsArgs& args, Pool& pool);
extern template void select_columns<float>(const SelectColumnsArgs& args, Pool& pool);

}  // namespace octavo
