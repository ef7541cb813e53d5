// Layouts of structs and numbers that Python mirrors, exported as text and checked when the library is loaded: native.library
// compares it with the ctypes of the same names.
//   LAYOUT(STRUCT(Shape, rows, length) STRUCT(Inputs, x, weight) NUMBER(TILE, TILE))
#pragma once

#include <cstddef>
#include <string>
#include <type_traits>

namespace layout_text {

template <class T>
const char* kind() {
    return std::is_pointer_v<T> ? "pointer" : std::is_floating_point_v<T> ? "float" : std::is_integral_v<T> ? "integer" : "struct";
}

template <class T>
std::string field(const char* owner, const char* name, std::size_t at) {
    return std::string(owner) + "." + name + " = " + kind<T>() + " of " + std::to_string(sizeof(T)) + " bytes at " + std::to_string(at) + "\n";
}

}  // namespace layout_text

// a macro for each field: one that expands to itself is expanded again by every EXPAND around it
#define LAYOUT_EXPAND(...) LAYOUT_EXPAND2(LAYOUT_EXPAND2(LAYOUT_EXPAND2(LAYOUT_EXPAND2(__VA_ARGS__))))
#define LAYOUT_EXPAND2(...) LAYOUT_EXPAND3(LAYOUT_EXPAND3(LAYOUT_EXPAND3(LAYOUT_EXPAND3(__VA_ARGS__))))
#define LAYOUT_EXPAND3(...) LAYOUT_EXPAND4(LAYOUT_EXPAND4(LAYOUT_EXPAND4(LAYOUT_EXPAND4(__VA_ARGS__))))
#define LAYOUT_EXPAND4(...) __VA_ARGS__
#define LAYOUT_PARENTHESES ()
#define LAYOUT_AGAIN() LAYOUT_EACH
#define LAYOUT_EACH(T, FIELD, ...) \
    +layout_text::field<decltype(T::FIELD)>(#T, #FIELD, offsetof(T, FIELD)) __VA_OPT__(LAYOUT_AGAIN LAYOUT_PARENTHESES(T, __VA_ARGS__))

#define STRUCT(T, ...) LAYOUT_EXPAND(LAYOUT_EACH(T, __VA_ARGS__)) + (#T " = " + std::to_string(sizeof(T)) + " bytes\n")
#define NUMBER(NAME, VALUE) +(#NAME " = " + std::to_string((long)(VALUE)) + "\n")

#define LAYOUT(...)                                        \
    extern "C" const char* layout() {                      \
        static const std::string text = std::string() __VA_ARGS__; \
        return text.c_str();                               \
    }
