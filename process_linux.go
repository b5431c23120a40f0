package copilot

// What Linux alone can do for process.go: list all processes, to find those of the child's that left its group; and notice the child's end
// while its number is still its own.

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"syscall"
	"unsafe"
)

// childAttr puts the child in a group of its own. A TCP server would never notice the death of its host, so it is
// told: to terminate, not killed, since only the server can clean up after its own commands. Nobody tells the child's
// child: npm's shim dies of it alone, and the server behind it survives a host that was killed. Over stdio both read
// the end of their input.
func childAttr(stdio bool) *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Setpgid: true}
	if !stdio {
		a.Pdeathsig = syscall.SIGTERM
	}
	return a
}

// awaitEnd waits for the child's end without reaping it, so that its number and its group's stay taken. It reports
// false if the system does not allow that.
func (f *family) awaitEnd() bool {
	const pPID = 1
	var info [128]byte // siginfo_t, not looked at
	for {
		_, _, errno := syscall.Syscall6(syscall.SYS_WAITID, pPID, uintptr(f.pid), uintptr(unsafe.Pointer(&info)),
			syscall.WEXITED|syscall.WNOWAIT, 0, 0)
		if errno != syscall.EINTR {
			return errno == 0
		}
	}
}

// kill ends the whole family. It is stopped first, and listed until nobody new appears: once a parent is dead, nothing
// tells whose its children were. An error means that the system refused; who else is left, remains tells.
func (f *family) kill() error {
	syscall.Kill(-f.pid, syscall.SIGSTOP)
	for range 10 {
		if !f.list(func(m kin) { m.signal(syscall.SIGSTOP) }) {
			break
		}
	}
	err := syscall.Kill(-f.pid, syscall.SIGKILL)
	for m := range f.members {
		m.signal(syscall.SIGKILL)
	}
	return os.NewSyscallError("kill", err)
}

// remains reports whether anybody but the child itself is left.
func (f *family) remains() bool {
	for m := range f.members {
		if s, err := readStat(m.pid); err == nil && s.kin == m {
			if !s.ended() {
				return true
			}
			s.reap()
		}
		delete(f.members, m)
	}
	return f.list(func(kin) {})
}

// list adds to the members, calls fresh for each new one, and reports whether there were any.
func (f *family) list(fresh func(kin)) bool {
	var all []stat
	if dir, err := os.Open("/proc"); err == nil {
		names, _ := dir.Readdirnames(-1)
		dir.Close()
		for _, name := range names {
			if pid, err := strconv.Atoi(name); err == nil {
				if s, err := readStat(pid); err == nil {
					all = append(all, s)
				}
			}
		}
	}
	// A descendant's group or session is the family's too, if a member leads it.
	ours := map[int]bool{f.pid: true}
	for grown := true; grown; {
		grown = false
		for _, s := range all {
			if !ours[s.pid] && (ours[s.parent] || ours[s.group] || ours[s.session]) {
				ours[s.pid], grown = true, true
			}
		}
	}
	found := false
	for _, s := range all {
		switch {
		case s.pid == f.pid || !ours[s.pid]:
		case s.ended():
			s.reap()
		case !f.members[s.kin]:
			f.members[s.kin], found = true, true
			fresh(s.kin)
		}
	}
	return found
}

// kin is a process whose number may have been given to another by now; the start time tells.
type kin struct {
	pid   int
	start uint64 // clock ticks since boot
}

// signal signals the kin unless it is gone. FindProcess holds on to the process that has the number now (a pidfd),
// and only then its identity is checked.
func (m kin) signal(sig syscall.Signal) {
	p, err := os.FindProcess(m.pid)
	if err != nil {
		return
	}
	defer p.Release()
	if s, err := readStat(m.pid); err == nil && s.kin == m {
		p.Signal(sig)
	}
}

// stat is what /proc/PID/stat tells.
type stat struct {
	kin
	state                  byte
	parent, group, session int
	threads                int
}

// ended reports that only the entry is left. A process whose first thread has ended looks like a zombie, too, while
// others still run.
func (s stat) ended() bool { return (s.state == 'Z' || s.state == 'X') && s.threads < 2 }

// reap reaps an ended orphan that fell to this program, which is the first process of a container, say.
func (s stat) reap() {
	if s.parent == os.Getpid() {
		syscall.Wait4(s.pid, nil, syscall.WNOHANG, nil)
	}
}

func readStat(pid int) (stat, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return stat{}, err
	}
	// The name stands in parentheses and may hold some itself.
	s := string(b)
	fields := strings.Fields(s[strings.LastIndexByte(s, ')')+1:])
	if len(fields) < 20 {
		return stat{}, errors.New("short stat")
	}
	st := stat{kin: kin{pid: pid}, state: fields[0][0]}
	st.parent, _ = strconv.Atoi(fields[1])
	st.group, _ = strconv.Atoi(fields[2])
	st.session, _ = strconv.Atoi(fields[3])
	st.threads, _ = strconv.Atoi(fields[17])
	st.start, err = strconv.ParseUint(fields[19], 10, 64)
	return st, err
}
