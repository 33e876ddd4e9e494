// What this processor can do, as far as the system lets us use it.
#pragma once

namespace octavo {

// In order: each has all that the ones before it have.
enum class Level { portable, avx2, avx512, amx };

Level best_level();

}  // namespace octavo
