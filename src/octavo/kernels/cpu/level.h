// What this processor can do, as far as the system lets us use it.
#pragma once

namespace octavo {

// In order: each has all that the ones before it have.
enum class Level { portable, avx2, avx2_vnni, avx512_vnni, avx512, amx };

Level best_level();

// Whether products of integers are those of AVX-VNNI; if not, a processor of that level has AVX-512's, by 32 bytes.
bool has_avx_vnni();

}  // namespace octavo
