// 64-byte vectors for every level. Included inside namespace octavo::OCTAVO_LEVEL, before all compute code. No
// standard-library templates here: the linker keeps one instantiation of each, possibly of a level that this processor
// lacks.
//
// Where registers are as wide, they are the compiler's vectors. Elsewhere they are pairs of half-width vectors,
// recursively, down to the register size: GCC 12 spills its own vectors to memory if no register holds them. Operators
// mean the same for both, casts keep the bits; what only one of them supports is a function here.

#if defined(OCTAVO_HAS_AVX512)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif

template <class Element, int kBytes>
struct Pair;

template <class Element, int kBytes, bool kIsPair = (kBytes > kRegisterBytes)>
struct VectorOf {
  typedef Element type __attribute__((vector_size(kBytes)));
};
template <class Element, int kBytes>
struct VectorOf<Element, kBytes, true> {
  typedef Pair<Element, kBytes> type;
};
template <class Element, int kBytes>
using Vector = typename VectorOf<Element, kBytes>::type;

// An element of a comparison result: 0 or -1, of the operand's size.
template <int kBytes>
struct MaskElement;
template <>
struct MaskElement<1> {
  typedef std::int8_t type;
};
template <>
struct MaskElement<2> {
  typedef std::int16_t type;
};
template <>
struct MaskElement<4> {
  typedef std::int32_t type;
};

#define OCTAVO_BY_HALVES(op)                                                                                       \
  [[gnu::always_inline]] friend Pair operator op(Pair a, Pair b) { return {a.low op b.low, a.high op b.high}; }     \
  [[gnu::always_inline]] friend Pair operator op(Pair a, Element b) { return {a.low op b, a.high op b}; }           \
  [[gnu::always_inline]] friend Pair operator op(Element a, Pair b) { return {a op b.low, a op b.high}; }           \
  template <class Other>                                                                                           \
  [[gnu::always_inline]] Pair& operator op##=(Other b) {                                                            \
    return *this = *this op b;                                                                                     \
  }
#define OCTAVO_COMPARED_BY_HALVES(op)                                                                              \
  [[gnu::always_inline]] friend Mask operator op(Pair a, Pair b) { return {a.low op b.low, a.high op b.high}; }     \
  [[gnu::always_inline]] friend Mask operator op(Pair a, Element b) { return {a.low op b, a.high op b}; }
#define OCTAVO_SHIFTED_BY_HALVES(op) \
  [[gnu::always_inline]] friend Pair operator op(Pair a, int count) { return {a.low op count, a.high op count}; }

template <class Element, int kBytes>
struct Pair {
  typedef Vector<Element, kBytes / 2> Half;
  typedef Pair<typename MaskElement<sizeof(Element)>::type, kBytes> Mask;

  Half low, high;

  Pair() = default;
  Pair(Half first, Half second) : low(first), high(second) {}
  template <class Other>
  explicit Pair(Pair<Other, kBytes> other) : low((Half)other.low), high((Half)other.high) {}

  Element operator[](int lane) const {
    constexpr int kLanes = kBytes / 2 / static_cast<int>(sizeof(Element));
    return lane < kLanes ? low[lane] : high[lane - kLanes];
  }

  [[gnu::always_inline]] friend Pair operator-(Pair a) { return {-a.low, -a.high}; }
  [[gnu::always_inline]] friend Pair operator~(Pair a) { return {~a.low, ~a.high}; }
  OCTAVO_BY_HALVES(+)
  OCTAVO_BY_HALVES(-)
  OCTAVO_BY_HALVES(*)
  OCTAVO_BY_HALVES(/)
  OCTAVO_BY_HALVES(&)
  OCTAVO_BY_HALVES(|)
  OCTAVO_BY_HALVES(^)
  OCTAVO_SHIFTED_BY_HALVES(<<)
  OCTAVO_SHIFTED_BY_HALVES(>>)
  OCTAVO_COMPARED_BY_HALVES(==)
  OCTAVO_COMPARED_BY_HALVES(!=)
  OCTAVO_COMPARED_BY_HALVES(<)
  OCTAVO_COMPARED_BY_HALVES(>)
  OCTAVO_COMPARED_BY_HALVES(<=)
  OCTAVO_COMPARED_BY_HALVES(>=)
};

#undef OCTAVO_BY_HALVES
#undef OCTAVO_COMPARED_BY_HALVES
#undef OCTAVO_SHIFTED_BY_HALVES

template <class Any>
constexpr bool kIsPair = false;
template <class Element, int kBytes>
constexpr bool kIsPair<Pair<Element, kBytes>> = true;

typedef Vector<float, 64> f32x16;
typedef Vector<std::int32_t, 64> i32x16;
typedef Vector<std::uint32_t, 64> u32x16;
typedef Vector<std::int16_t, 64> i16x32;
typedef Vector<std::uint16_t, 64> u16x32;
typedef Vector<std::int8_t, 64> i8x64;
typedef Vector<std::uint8_t, 64> u8x64;
typedef Vector<std::uint16_t, 32> u16x16;

typedef Vector<float, kRegisterBytes> Register;
typedef Vector<std::uint32_t, kRegisterBytes> Words;
constexpr int kLanes = kRegisterBytes / 4;

template <class V>
[[gnu::always_inline]] static inline V load(const void* from) {
  if constexpr (kIsPair<V>) {
    typedef typename V::Half Half;
    return {load<Half>(from), load<Half>(static_cast<const char*>(from) + sizeof(Half))};
  } else {
    V result;
    __builtin_memcpy(&result, from, sizeof result);
    return result;
  }
}

template <class V>
[[gnu::always_inline]] static inline void store(void* to, V value) {
  if constexpr (kIsPair<V>) {
    store(to, value.low);
    store(static_cast<char*>(to) + sizeof value.low, value.high);
  } else {
    __builtin_memcpy(to, &value, sizeof value);
  }
}

// Per lane: a where the mask is -1, b where it is 0.
template <class Mask, class V>
[[gnu::always_inline]] static inline V select(Mask mask, V a, V b) {
  if constexpr (kIsPair<V>) {
    return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
  } else {
    return mask ? a : b;
  }
}

// Converts each element to a type of the same size.
template <class To, class From>
[[gnu::always_inline]] static inline To convert(From from) {
  if constexpr (kIsPair<To>) {
    return {convert<typename To::Half>(from.low), convert<typename To::Half>(from.high)};
  } else {
    return __builtin_convertvector(from, To);
  }
}

static inline i32x16 lane_numbers() {
#if defined(OCTAVO_HAS_AVX512)
  return i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
  constexpr std::int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load<i32x16>(numbers);
#endif
}

// Selects lanes of the concatenation of two register-sized vectors by index.
template <int... kFrom, class V>
[[gnu::always_inline]] static inline V shuffle(V a, V b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kFrom...);
#else
  typedef decltype(a == b) Mask;
  return __builtin_shuffle(a, b, Mask{kFrom...});
#endif
}
