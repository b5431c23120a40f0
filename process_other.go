//go:build darwin || dragonfly || freebsd || netbsd || openbsd

package copilot

// process.go on systems where only the child's group can be reached.

import (
	"os"
	"syscall"
)

// kin is not used: there is no list of processes to find those in who left the group.
type kin struct{}

// childAttr puts the child in a group of its own. Nothing tells a TCP server that its host was killed.
func childAttr(bool) *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// awaitEnd waits for the child's end without reaping it, so that its number and its group's stay taken. It reports
// false if the system does not allow that.
func (f *family) awaitEnd() bool {
	q, err := syscall.Kqueue()
	if err != nil {
		return false
	}
	defer syscall.Close(q)
	ev := make([]syscall.Kevent_t, 1)
	syscall.SetKevent(&ev[0], f.pid, syscall.EVFILT_PROC, syscall.EV_ADD|syscall.EV_ONESHOT)
	ev[0].Fflags = syscall.NOTE_EXIT
	for {
		_, err := syscall.Kevent(q, ev, ev, nil)
		if err != syscall.EINTR {
			return err == nil && ev[0].Flags&syscall.EV_ERROR == 0
		}
	}
}

// kill ends the group. An error means that the system refused.
func (f *family) kill() error {
	err := syscall.Kill(-f.pid, syscall.SIGKILL)
	if err != nil && syscall.Kill(f.pid, 0) == syscall.ESRCH {
		return nil // there was nobody but the ended child
	}
	return os.NewSyscallError("kill", err)
}

// remains reports whether anybody but the child itself is left in the group.
func (f *family) remains() bool { return syscall.Kill(-f.pid, 0) == nil }
