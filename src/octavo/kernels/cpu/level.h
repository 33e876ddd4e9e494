// What this processor supports, as far as the OS enables it.
#pragma once

namespace octavo {

// In order: each level includes the ones before it.
enum class Level { portable, avx2, avx2_vnni, avx512_vnni, avx512, amx };

Level best_level();

// Whether integer products use AVX-VNNI; otherwise a processor of that level uses AVX-512 VNNI with 32-byte vectors.
bool has_avx_vnni();

}  // namespace octavo
