/* The header as the first include of a C or C++ program. */
#include <kvferry.h>

#include <stdio.h>
#include <string.h>

int main(void) {
  char text[16] = "";
  if (strcmp(kvf_status_name(KVF_ERR_ABI_MISMATCH), "KVF_ERR_ABI_MISMATCH") != 0) return 1;
  if (kvf_last_error(text, sizeof text) != 0) return 2;
  if (kvf_version() != KVF_VERSION || kvf_abi_version() != KVF_ABI_VERSION) return 3;
  printf("kvferry %s\n", kvf_version_string());
  return 0;
}
