#include "available_ops.h"

#include <stdexcept>

#include "level.h"

namespace octavo {

std::vector<const Ops*> available_ops() {
  std::vector<const Ops*> ops;
#if defined(__x86_64__)
  const Level best = best_level();
  if (best >= Level::amx) ops.push_back(&ops_amx);
  if (best >= Level::avx512) ops.push_back(&ops_avx512);
  if (best >= Level::avx512_vnni) ops.push_back(&ops_avx512_vnni);
  if (best >= Level::avx2_vnni) ops.push_back(&ops_avx2_vnni);
  if (best >= Level::avx2) ops.push_back(&ops_avx2);
#endif
  ops.push_back(&ops_portable);
  return ops;
}

const Ops& find_ops(const std::string& level) {
  for (const Ops* ops : available_ops())
    if (level == ops->name) return *ops;
  throw std::invalid_argument("this processor does not support level " + level);
}

}  // namespace octavo
