/* One engine plugin; built twice, against two versions of kvferry. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <kvferry.h>

#define NAME2(name) name##_library
#define NAME(name) NAME2(name)

/* File of the library that this plugin's calls go to. */
const char *NAME(PLUGIN)(void);
const char *NAME(PLUGIN)(void) {
  Dl_info info;
  return dladdr((void *)kvf_version, &info) != 0 && kvf_version() != 0 ? info.dli_fname : "none";
}
