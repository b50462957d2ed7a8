// Reports invalid arguments by an exception. Its message is built without streams, which crash if a toolchain links a
// copy of libstdc++ into the library. Such an exception may still not reach Python; `_crash` in build.py tests it.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

namespace workhorse {

template <class Part>
void append(std::string& text, const Part& part) {
  if constexpr (std::is_arithmetic_v<Part>) text += std::to_string(part);
  else text += part;
}

template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void refuse(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  throw std::runtime_error(text);
}

}  // namespace workhorse

// Throws the message that follows the condition; the message has parts, which are strings and integers.
#define WORKHORSE_CHECK(condition, ...) \
  do {                                  \
    if (!(condition)) [[unlikely]]      \
      workhorse::refuse(__VA_ARGS__);   \
  } while (false)
