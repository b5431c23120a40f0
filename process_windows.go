package copilot

// process.go on Windows: a job object holds the child and whatever it starts, and ends them together.

import (
	"errors"
	"os"
	"syscall"
	"unsafe"
)

var (
	kernel32                 = syscall.NewLazyDLL("kernel32.dll")
	createJobObject          = kernel32.NewProc("CreateJobObjectW")
	setInformationJobObject  = kernel32.NewProc("SetInformationJobObject")
	assignProcessToJobObject = kernel32.NewProc("AssignProcessToJobObject")
	terminateJobObject       = kernel32.NewProc("TerminateJobObject")
	ntResumeProcess          = syscall.NewLazyDLL("ntdll.dll").NewProc("NtResumeProcess")
)

// openNoFollow is for systems that have such a flag.
const openNoFollow = 0

// family is the child and what it started: a job that ends with its last handle, so also when this program dies.
type family struct {
	job, child syscall.Handle
}

// childAttr starts the child without a console window and, until it is in its job, without running it: what it starts
// is then in the job, too.
func childAttr(bool) *syscall.SysProcAttr {
	const createSuspended, createNoWindow = 0x4, 0x08000000
	return &syscall.SysProcAttr{HideWindow: true, CreationFlags: createSuspended | createNoWindow}
}

// adopt puts the child in a job and lets it run.
func (f *family) adopt(child *os.Process) (err error) {
	defer func() {
		if err != nil {
			f.release()
		}
	}()
	const terminate, setQuota, suspendResume = 0x1, 0x100, 0x800
	if f.child, err = syscall.OpenProcess(terminate|setQuota|suspendResume|syscall.SYNCHRONIZE, false, uint32(child.Pid)); err != nil {
		return os.NewSyscallError("OpenProcess", err)
	}
	job, _, err := createJobObject.Call(0, 0)
	if job == 0 {
		return os.NewSyscallError("CreateJobObject", err)
	}
	f.job = syscall.Handle(job)
	// JOBOBJECT_EXTENDED_LIMIT_INFORMATION: 144 bytes, 112 where pointers are small; its flags are at 16.
	var limits [18]uint64
	limits[2] = 0x2000 // JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE
	size := 80 + 8*unsafe.Sizeof(uintptr(0))
	const extendedLimitInformation = 9
	if ok, _, err := setInformationJobObject.Call(job, extendedLimitInformation, uintptr(unsafe.Pointer(&limits)), size); ok == 0 {
		return os.NewSyscallError("SetInformationJobObject", err)
	}
	if ok, _, err := assignProcessToJobObject.Call(job, uintptr(f.child)); ok == 0 {
		return os.NewSyscallError("AssignProcessToJobObject", err)
	}
	if status, _, _ := ntResumeProcess.Call(uintptr(f.child)); int32(status) < 0 {
		return errors.New("NtResumeProcess refused")
	}
	return nil
}

// awaitEnd waits for the child's end. Our handle keeps its number taken.
func (f *family) awaitEnd() bool {
	s, err := syscall.WaitForSingleObject(f.child, syscall.INFINITE)
	return err == nil && s == syscall.WAIT_OBJECT_0
}

// terminate is not to be had: without a console there is nobody to ask.
func (f *family) terminate() error { return errors.ErrUnsupported }

// kill ends the whole job. An error means that the system refused.
func (f *family) kill() error {
	if ok, _, err := terminateJobObject.Call(uintptr(f.job), 1); ok == 0 {
		return os.NewSyscallError("TerminateJobObject", err)
	}
	return nil
}

// remains reports whether anybody but the child itself is left: nobody survives the end of the job.
func (f *family) remains() bool { return false }

func (f *family) release() {
	syscall.CloseHandle(f.job)
	syscall.CloseHandle(f.child)
}
