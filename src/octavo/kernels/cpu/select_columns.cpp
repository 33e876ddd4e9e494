#include "select_columns.h"

namespace octavo {
namespace {

constexpr std::int64_t kColumnsOfChunk = 1024;  // a microsecond's work, so that one row is divided among threads too

}  // namespace

template <class Element>
void select_columns(const SelectColumnsArgs& args, Pool& pool) {
  const std::int64_t per_row = (args.num_columns + kColumnsOfChunk - 1) / kColumnsOfChunk;
  pool.run(args.rows.rows * per_row, [&](std::int64_t chunk) {
    const std::int64_t row = chunk / per_row, begin = chunk % per_row * kColumnsOfChunk;
    const std::int64_t end = begin + kColumnsOfChunk < args.num_columns ? begin + kColumnsOfChunk : args.num_columns;
    const Element* from = static_cast<const Element*>(args.rows.x) + row * args.rows.size;
    Element* to = static_cast<Element*>(args.out) + row * args.num_columns;
    for (std::int64_t j = begin; j < end; ++j) to[j] = args.order[j] >= 0 ? from[args.order[j]] : Element{};
  });
}

template void select_columns<bf16>(const SelectColumnsArgs& args, Pool& pool);
template void select_columns<float>(const SelectColumnsArgs& args, Pool& pool);

}  // namespace octavo
