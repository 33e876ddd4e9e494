// Sizes of packed weights: the same at every level.
#include "ops.h"

namespace octavo {

std::int64_t packed_size(std::int64_t in_size, std::int64_t out_size, bool is_gated) {
  const std::int64_t outputs_per_panel = is_gated ? 16 : 32;
  return (out_size + outputs_per_panel - 1) / outputs_per_panel * ((in_size + 31) / 32) * 1024;
}

static std::int64_t num_panels(const PackIntegersArgs& args) {
  const std::int64_t outputs_per_panel = args.is_gated ? 16 : 32;
  return (args.out_size + outputs_per_panel - 1) / outputs_per_panel;
}

std::int64_t packed_integers_size(const PackIntegersArgs& args) {
  const std::int64_t k_tile_bytes = 256 * args.form.bits + (args.form.is_two_level ? 64 : 0);
  return num_panels(args) * ((args.in_size + 63) / 64) * k_tile_bytes;
}

std::int64_t packed_scales_size(const PackIntegersArgs& args) {
  const std::int64_t group_size = args.form.group_size ? args.form.group_size : args.in_size;
  return num_panels(args) * ((args.in_size + group_size - 1) / group_size) * 32;
}

}  // namespace octavo
