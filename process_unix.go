//go:build unix

package copilot

// What all Unix systems have in common.

import (
	"os"
	"syscall"
)

// openNoFollow makes opening a link an error, and a pipe that nobody holds open no wait.
const openNoFollow = syscall.O_NOFOLLOW | syscall.O_NONBLOCK

// family is the child, which leads a process group of its own (a terminal's interrupt does not reach it), and what it
// started. On Linux that includes those who left the group; elsewhere they cannot be found.
type family struct {
	pid     int
	members map[kin]bool // seen, and not known to be gone; Linux only
}

func (f *family) adopt(child *os.Process) error {
	f.pid, f.members = child.Pid, make(map[kin]bool)
	return nil
}

// terminate asks the group to leave. Those who left the group are for the server to end.
func (f *family) terminate() error { return syscall.Kill(-f.pid, syscall.SIGTERM) }

func (f *family) release() {}
