/* kvferry and another Rust library in one program: both catch their own panics. */
#define KVFERRY_FEATURE_TESTING
#include <kvferry.h>

#include <stdint.h>
#include <stdio.h>
#include <string.h>

int32_t foreign_catches_a_panic(void);

int main(void) {
  char text[256];
  if (foreign_catches_a_panic() != 1) return 1;
  if (kvf_testing_panic() != KVF_ERR_INTERNAL) return 2;
  kvf_last_error(text, sizeof text);
  puts(text);
  if (strstr(text, "panic: asked to") == NULL) return 3;
  return foreign_catches_a_panic() == 1 ? 0 : 4;
}
