/* Two plugins in one process, each linked to its own version of kvferry. */
#include <stdio.h>
#include <string.h>

const char *old_library(void);
const char *new_library(void);

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  printf("old: %s\nnew: %s\n", old_library(), new_library());
  return strstr(old_library(), argv[1]) != NULL && strstr(new_library(), argv[2]) != NULL ? 0 : 1;
}
