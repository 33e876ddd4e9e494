// The levels that a program checks.
#pragma once
#include <cstdio>
#include <cstring>

#include "available_ops.h"

// The body of a program's main: calls check(ops), which says whether all is well, for each level or the one that is named.
// Returns the exit status: 2 where the machine has no such level.
template <class Check>
int check_levels(int count, char** names, const Check& check) {
  bool is_well = true;
  int num_checked = 0;
  for (const octavo::Ops* ops : octavo::available_ops()) {
    if (count > 1 && std::strcmp(names[1], ops->name) != 0) continue;
    is_well &= check(*ops);
    std::fflush(stdout);
    ++num_checked;
  }
  if (num_checked == 0) std::fprintf(stderr, "this machine has no level %s\n", names[1]);
  return num_checked == 0 ? 2 : is_well ? 0 : 1;
}
