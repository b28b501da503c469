/* What omlxd calls of macOS's C library, with its contracts and this Linux's figures. */

#include <errno.h>
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int free_percent(void) {
    long total = 0, available = 0;
    char line[128];
    FILE *file = fopen("/proc/meminfo", "r");
    while (file && fgets(line, sizeof line, file)) {
        sscanf(line, "MemTotal: %ld", &total);
        sscanf(line, "MemAvailable: %ld", &available);
    }
    if (file) fclose(file);
    return total ? (int)(100 * available / total) : 0;
}

int sysctlbyname(const char *name, void *old, size_t *size, const void *new, size_t new_size) {
    int value = 1;
    if (new || new_size) return errno = EPERM, -1;
    if (!strcmp(name, "kern.memorystatus_level"))
        value = free_percent();
    else if (strcmp(name, "kern.memorystatus_vm_pressure_level"))
        return errno = ENOENT, -1;
    if (*size < sizeof value) return errno = ENOMEM, -1;
    memcpy(old, &value, *size = sizeof value);
    return 0;
}

struct rusage_info_v0 {
    uint8_t uuid[16];
    uint64_t user_time, system_time, pkg_idle_wkups, interrupt_wkups, pageins, wired_size, resident_size,
        phys_footprint, proc_start_abstime, proc_exit_abstime;
};

int proc_pid_rusage(int pid, int flavor, struct rusage_info_v0 *usage) {
    char path[64];
    long resident = 0, shared = 0;
    if (flavor) return errno = EINVAL, -1; /* macOS has more. */
    snprintf(path, sizeof path, "/proc/%d/statm", pid);
    FILE *file = fopen(path, "r");
    if (!file) return errno = ESRCH, -1;
    if (fscanf(file, "%*d %ld %ld", &resident, &shared) != 2) resident = shared = 0;
    fclose(file);
    memset(usage, 0, sizeof *usage);
    usage->resident_size = (uint64_t)resident * sysconf(_SC_PAGESIZE);
    usage->phys_footprint = (uint64_t)(resident - shared) * sysconf(_SC_PAGESIZE);
    return 0;
}

size_t malloc_zone_pressure_relief(void *zone, size_t goal) {
    (void)zone, (void)goal;
    malloc_trim(0);
    return 0;
}

/* launchd started none of these processes. */
int launch_activate_socket(const char *name, int **descriptors, size_t *count) {
    (void)name, (void)descriptors, (void)count;
    return ESRCH;
}
