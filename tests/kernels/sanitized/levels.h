// The levels that a program checks.
#pragma once
#include <cstdio>
#include <cstring>
#include <vector>

#include "level.h"
#include "ops.h"

// All that this machine has.
inline std::vector<const octavo::Ops*> available_levels() {
  std::vector<const octavo::Ops*> all{&octavo::ops_portable};
#if defined(__x86_64__)
  const octavo::Level best = octavo::best_level();
  if (best >= octavo::Level::avx2) all.push_back(&octavo::ops_avx2);
  if (best >= octavo::Level::avx2_vnni) all.push_back(&octavo::ops_avx2_vnni);
  if (best >= octavo::Level::avx512_vnni) all.push_back(&octavo::ops_avx512_vnni);
  if (best >= octavo::Level::avx512) all.push_back(&octavo::ops_avx512);
  if (best >= octavo::Level::amx) all.push_back(&octavo::ops_amx);
#endif
  return all;
}

// The body of a program's main: calls check(ops), which says whether all is well, for each level or the one that is named.
// Returns the exit status: 2 where the machine has no such level.
template <class Check>
int check_levels(int count, char** names, const Check& check) {
  bool is_well = true;
  int num_checked = 0;
  for (const octavo::Ops* ops : available_levels()) {
    if (count > 1 && std::strcmp(names[1], ops->name) != 0) continue;
    is_well &= check(*ops);
    std::fflush(stdout);
    ++num_checked;
  }
  if (num_checked == 0) std::fprintf(stderr, "this machine has no level %s\n", names[1]);
  return num_checked == 0 ? 2 : is_well ? 0 : 1;
}
