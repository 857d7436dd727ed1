/* The bare limit of kvferry's `ucx`: one thread that keeps a window of ucp_get on their way, out of
 * random blocks of a large buffer of another process, into the next blocks of another one.
 *
 * bare_get BLOCK_BYTES BLOCKS POOL_MIB WINDOW REPEATS   prints GB/s of each repetition
 *
 * The child is the source; it progresses, busily, until its standard input ends. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <poll.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

static void check(ucs_status_t status, const char *what) {
  if (status == UCS_OK) return;
  fprintf(stderr, "%s: %d\n", what, status);
  exit(1);
}

static void *memory(size_t bytes) {
  void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (at == MAP_FAILED) exit(1);
  memset(at, 7, bytes);
  return at;
}

static ucp_context_h context;
static ucp_worker_h worker;

static void open_ucx(void) {
  ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_RMA};
  check(ucp_init(&params, NULL, &context), "ucp_init");
  ucp_worker_params_t wp = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                            .thread_mode = UCS_THREAD_MODE_SINGLE};
  check(ucp_worker_create(context, &wp, &worker), "ucp_worker_create");
}

static ucp_mem_h map(void *at, size_t bytes) {
  ucp_mem_map_params_t params = {
      .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
      .address = at,
      .length = bytes};
  ucp_mem_h memh;
  check(ucp_mem_map(context, &params, &memh), "ucp_mem_map");
  return memh;
}

static void put(int fd, const void *bytes, size_t n) {
  if (write(fd, &n, sizeof n) != sizeof n || write(fd, bytes, n) != (ssize_t)n) exit(1);
}
static void *get(int fd) {
  size_t n;
  if (read(fd, &n, sizeof n) != sizeof n) exit(1);
  char *bytes = malloc(n);
  if (read(fd, bytes, n) != (ssize_t)n) exit(1);
  return bytes;
}

static void source(int in, int out, size_t bytes) {
  char *pool = memory(bytes);
  open_ucx();
  void *key;
  size_t key_bytes, address_bytes;
  check(ucp_rkey_pack(context, map(pool, bytes), &key, &key_bytes), "ucp_rkey_pack");
  ucp_address_t *address;
  check(ucp_worker_get_address(worker, &address, &address_bytes), "ucp_worker_get_address");
  put(out, address, address_bytes);
  put(out, key, key_bytes);
  put(out, &pool, sizeof pool);
  struct pollfd end = {in, POLLIN, 0};
  for (unsigned i = 0;; ++i) {
    ucp_worker_progress(worker);
    if (i % 1024 == 0 && poll(&end, 1, 0) != 0) _exit(0);
  }
}

static int outstanding;
static void done(void *request, ucs_status_t status, void *arg) {
  (void)arg;
  check(status, "get");
  --outstanding;
  ucp_request_free(request);
}

int main(int argc, char **argv) {
  if (argc != 6) return 2;
  const size_t block = strtoull(argv[1], NULL, 10), blocks = strtoull(argv[2], NULL, 10);
  const size_t bytes = strtoull(argv[3], NULL, 10) << 20, slots = bytes / block;
  const int window = atoi(argv[4]), repeats = atoi(argv[5]);
  int down[2], up[2];
  if (blocks > slots || pipe(down) != 0 || pipe(up) != 0) return 2;
  const pid_t child = fork();
  if (child == 0) {
    close(down[1]);
    source(down[0], up[1], bytes);
  }
  char *room = memory(block * blocks);
  open_ucx();
  ucp_mem_h memh = map(room, block * blocks);
  ucp_ep_params_t ep_params = {
      .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
      .address = get(up[0]),
      .err_mode = UCP_ERR_HANDLING_MODE_PEER};
  ucp_ep_h ep;
  check(ucp_ep_create(worker, &ep_params, &ep), "ucp_ep_create");
  ucp_rkey_h key;
  check(ucp_ep_rkey_unpack(ep, get(up[0]), &key), "ucp_ep_rkey_unpack");
  const uint64_t pool = *(uint64_t *)get(up[0]);
  uint32_t *order = malloc(slots * sizeof *order);
  for (size_t i = 0; i < slots; ++i) order[i] = (uint32_t)i;
  ucp_request_param_t params = {
      .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_MEMH,
      .cb.send = done,
      .memh = memh};
  for (int r = -1; r < repeats; ++r) { /* the first one connects */
    for (size_t i = 0; i < blocks; ++i) {
      const size_t j = i + (size_t)rand() % (slots - i);
      const uint32_t other = order[j];
      order[j] = order[i];
      order[i] = other;
    }
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (size_t i = 0; i < blocks; ++i) {
      while (outstanding >= window) ucp_worker_progress(worker);
      ucs_status_ptr_t request =
          ucp_get_nbx(ep, room + i * block, block, pool + order[i] * block, key, &params);
      if (UCS_PTR_IS_ERR(request)) check(UCS_PTR_STATUS(request), "ucp_get_nbx");
      if (request != NULL) ++outstanding;
    }
    while (outstanding > 0) ucp_worker_progress(worker);
    clock_gettime(CLOCK_MONOTONIC, &b);
    const double s = (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) / 1e9;
    if (r >= 0) printf("%.4f\n", (double)(block * blocks) / s / 1e9);
  }
  close(down[1]);
  waitpid(child, NULL, 0);
  return 0;
}
