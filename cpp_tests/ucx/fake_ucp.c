/* A libucp that is wrong in one way. Only what a loader looks at: the right names, and a version. */
#include <stddef.h>

#ifndef FAKE_MINOR
#define FAKE_MINOR 13
#endif
#define NO_DEVICE ((signed char)-14)

void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release) {
  *major = 1;
  *minor = FAKE_MINOR;
  *release = 0;
}
const char *ucp_get_version_string(void) { return "fake"; }
const char *ucs_status_string(signed char status) {
  (void)status;
  return "No such device";
}
signed char ucp_config_read(const char *prefix, const char *file, void **config) {
  (void)prefix;
  (void)file;
  *config = NULL;
  return 0;
}
signed char ucp_config_modify(void *config, const char *name, const char *value) {
  (void)config;
  (void)name;
  (void)value;
  return 0;
}
void ucp_config_release(void *config) { (void)config; }
signed char ucp_init_version(unsigned major, unsigned minor, const void *params, void *config,
                             void **context) {
  (void)major;
  (void)minor;
  (void)params;
  (void)config;
  (void)context;
  return NO_DEVICE;
}

/* Never called: ucp_init_version has failed. */
#define NEVER(name)                                                                      \
  void name(void);                                                                       \
  void name(void) { __builtin_trap(); }
NEVER(ucp_cleanup)
NEVER(ucp_context_query)
NEVER(ucp_worker_create)
NEVER(ucp_worker_destroy)
NEVER(ucp_worker_get_efd)
NEVER(ucp_worker_arm)
NEVER(ucp_worker_progress)
NEVER(ucp_worker_get_address)
NEVER(ucp_worker_release_address)
NEVER(ucp_mem_map)
NEVER(ucp_mem_unmap)
NEVER(ucp_rkey_pack)
NEVER(ucp_rkey_buffer_release)
NEVER(ucp_rkey_destroy)
NEVER(ucp_ep_create)
NEVER(ucp_ep_close_nbx)
NEVER(ucp_ep_rkey_unpack)
#ifndef FAKE_WITHOUT_GET
NEVER(ucp_get_nbx)
#endif
NEVER(ucp_worker_set_am_recv_handler)
NEVER(ucp_am_send_nbx)
NEVER(ucp_request_free)
NEVER(ucp_request_check_status)
