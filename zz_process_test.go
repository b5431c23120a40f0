package copilot

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// procChild is what the test binary does as a child. It says "ready" on stdout where the test has to know.
func procChild(mode string) int {
	note := func(what string) {
		if f, err := os.OpenFile(os.Getenv("PROC_LOG"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600); err == nil {
			fmt.Fprintln(f, what)
			f.Close()
		}
	}
	forever := func() int { select {} }
	mine, others, _ := strings.Cut(os.Getenv("PROC_GRAND"), ",") // a chain of modes, one for each generation
	grandEnv := append(os.Environ(), "COPILOT_TEST_CHILD="+mine, "PROC_GRAND="+others)
	grandchild := func(program string, args ...string) *exec.Cmd {
		cmd := exec.Command(program, args...)
		cmd.Env = grandEnv
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		if err := cmd.Start(); err != nil {
			fmt.Println("start:", err)
			os.Exit(98)
		}
		return cmd
	}
	// The read end of a pipe to nobody keeps the runtime from calling an empty select a deadlock.
	if r, w, err := os.Pipe(); err == nil {
		defer w.Close()
		// Ends with the program.
		go r.Read(make([]byte, 1))
	}
	self := os.Getenv("PROC_SELF")
	if self == "" {
		self, _ = os.Executable()
	}
	switch mode {
	case "exit42":
		fmt.Fprint(os.Stderr, "one\ntwo\nthree\n")
		return 42
	case "eof": // a good server
		fmt.Println("ready")
		io.Copy(io.Discard, os.Stdin)
		note("EOF")
		return 0
	case "deaf": // ignores EOF
		c := make(chan os.Signal, 1)
		signal.Notify(c, syscall.SIGTERM)
		fmt.Println("ready")
		io.Copy(io.Discard, os.Stdin)
		note("EOF")
		<-c
		note("TERM")
		return 0
	case "tcp": // a good server over TCP
		c := make(chan os.Signal, 1)
		signal.Notify(c, syscall.SIGTERM)
		fmt.Println("listening on port 1")
		<-c
		note("TERM")
		return 0
	case "slow": // takes its time to clean up after TERM
		c := make(chan os.Signal, 1)
		signal.Notify(c, syscall.SIGTERM)
		fmt.Println("listening on port 1")
		<-c
		note("TERM")
		<-time.After(150 * time.Millisecond)
		note("clean")
		return 0
	case "stubborn": // ignores EOF, TERM, HUP, INT
		c := make(chan os.Signal, 1)
		signal.Ignore(syscall.SIGHUP, syscall.SIGINT)
		signal.Notify(c, syscall.SIGTERM)
		fmt.Println("ready")
		// Ends with the program.
		go func() {
			<-c
			note("TERM")
		}()
		io.Copy(io.Discard, os.Stdin)
		note("EOF")
		return forever()
	case "quiet": // ignores everything, prints nothing
		signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM)
		return forever()
	case "interrupt":
		c := make(chan os.Signal, 1)
		signal.Notify(c, os.Interrupt)
		fmt.Println("ready")
		// Ends with the program.
		go func() {
			<-c
			note("INT")
		}()
		io.Copy(io.Discard, os.Stdin)
		note("EOF")
		return 0
	case "shim": // as npm's
		grandchild(self).Wait()
		return 0
	case "setsid": // runs a command in a session of its own, then ignores everything
		signal.Ignore(syscall.SIGTERM, syscall.SIGHUP)
		grandchild("setsid", self)
		return forever()
	case "orphan": // leaves with a grandchild in its group that holds the pipes
		grandchild(self)
		fmt.Println("ready")
		bufio.NewReader(os.Stdin).ReadString('\n')
		fmt.Print("last words")
		return 3
	case "orphan-out": // the same, but the grandchild has left the group and cannot be found afterwards
		cmd := grandchild("setsid", "--fork", self)
		cmd.Wait()
		fmt.Println("ready")
		bufio.NewReader(os.Stdin).ReadString('\n')
		fmt.Print("last words")
		return 3
	case "flood":
		line := bytes.Repeat([]byte("x"), 1023)
		for range 8 << 10 {
			os.Stderr.Write(append(line, '\n'))
		}
		fmt.Println("ready")
		io.Copy(io.Discard, os.Stdin)
		return 0
	case "print": // PROC_OUT on stdout, piece by piece, and stay
		for _, piece := range strings.Split(os.Getenv("PROC_OUT"), "|") {
			if n, ok := strings.CutPrefix(piece, "BIG"); ok {
				size, _ := strconv.Atoi(n)
				piece = strings.Repeat("z", size)
			}
			if piece == "EXIT" {
				return 5
			}
			os.Stdout.WriteString(piece)
		}
		note("printed")
		return forever()
	case "errprint": // PROC_OUT on stderr
		os.Stderr.WriteString(os.Getenv("PROC_OUT"))
		return 1
	case "env":
		json.NewEncoder(os.Stdout).Encode([][]string{os.Args[1:], os.Environ()})
		return 0
	case "host": // a program that uses the package, to be killed or interrupted
		signal.Ignore(os.Interrupt)
		o := &Options{CLI: self, Env: grandEnv}
		if os.Getenv("PROC_TCP") != "" {
			o.Transport = TCP
		}
		if cli := os.Getenv("PROC_CLI"); cli != "" {
			o.CLI = cli
		}
		c, err := newCommand(o)
		if err != nil {
			fmt.Println(err)
			return 97
		}
		p, err := c.start()
		if err != nil {
			fmt.Println(err)
			return 96
		}
		if o.Transport == TCP {
			_, err = p.listenPort(context.Background())
		} else if os.Getenv("PROC_CLI") == "" {
			_, err = bufio.NewReader(p.stdout).ReadString('\n')
		}
		if err != nil {
			fmt.Println(err)
			return 95
		}
		fmt.Println("ready", p.pid())
		bufio.NewReader(os.Stdin).ReadString('\n')
		if err := p.end(context.Background(), 10*time.Second, false); err != nil {
			fmt.Println(err)
			return 94
		}
		return 0
	}
	return 99
}

// procCtx is a context for what must not take long.
func procCtx(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// procMark gives an environment that every process of this test will carry, and checks at the end that none is left,
// nor a goroutine nor a descriptor.
func procMark(t *testing.T, vars ...string) []string {
	t.Helper()
	mark := fmt.Sprintf("PROC_MARK=%s.%d.%d", strings.ReplaceAll(t.Name(), " ", "_"), os.Getpid(), time.Now().UnixNano())
	procLeakCheck(t, mark)
	// A child built with the race detector would sleep for a second before it leaves.
	return slices.Concat(os.Environ(), []string{mark, "GORACE=atexit_sleep_ms=0"}, vars)
}

func procLeakCheck(t *testing.T, mark string) {
	t.Helper()
	files := func() int {
		d, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			return 0
		}
		return len(d)
	}
	// The poller's own descriptors are opened once.
	if r, w, err := os.Pipe(); err == nil {
		r.Close()
		w.Close()
	}
	goroutines, descriptors := runtime.NumGoroutine(), files()
	t.Cleanup(func() {
		deadline := time.Now().Add(3 * time.Second)
		for {
			left := procFind(mark)
			g, d := runtime.NumGoroutine(), files()
			if len(left) == 0 && g <= goroutines && d <= descriptors {
				return
			}
			if time.Now().After(deadline) {
				buf := make([]byte, 1<<20)
				t.Errorf("left: processes %v, goroutines %d of %d, descriptors %d of %d\n%s", left, g, goroutines, d, descriptors, buf[:runtime.Stack(buf, true)])
				for _, pid := range left {
					if p, err := os.FindProcess(pid); err == nil {
						p.Kill()
					}
				}
				return
			}
			<-time.After(5 * time.Millisecond)
		}
	})
}

// procFind lists the live processes that carry mark in their environment, and this one's children in any state.
func procFind(mark string) (pids []int) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		pid, _ := strconv.Atoi(filepath.Base(dir))
		if pid == os.Getpid() {
			continue
		}
		env, _ := os.ReadFile(dir + "/environ")
		b, _ := os.ReadFile(dir + "/stat")
		f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
		child := len(f) > 1 && f[1] == strconv.Itoa(os.Getpid())
		if child || bytes.Contains(env, []byte(mark)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// procStart starts a program, the test binary if o names none.
func procStart(t *testing.T, o Options, mode string) *process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if o.CLI == "" {
		o.CLI = self
	}
	o.Env = append(slices.Clone(o.Env), "COPILOT_TEST_CHILD="+mode)
	c, err := newCommand(&o)
	if err != nil {
		t.Fatal(err)
	}
	p, err := c.start()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.forceStop().Wait(procCtx(t))
		p.stdout.Close()
	})
	return p
}

func procReady(t *testing.T, p *process) {
	t.Helper()
	var line []byte
	for b := make([]byte, 1); b[0] != '\n'; line = append(line, b[0]) {
		if _, err := p.stdout.Read(b); err != nil {
			t.Fatalf("child is not ready: %q, %v", line, err)
		}
	}
	if !strings.HasPrefix(string(line), "ready") {
		t.Fatalf("child says %q", line)
	}
}

func procLog(t *testing.T, file string) []string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return strings.Fields(string(b))
}

// procAwaitLog waits until the child has written a word to its log.
func procAwaitLog(t *testing.T, file, word string) {
	t.Helper()
	for ctx := procCtx(t); !slices.Contains(procLog(t, file), word); {
		select {
		case <-ctx.Done():
			t.Fatalf("no %s in the log: %v", word, procLog(t, file))
		case <-time.After(2 * time.Millisecond):
		}
	}
}

func procUnix(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("signals")
	}
}

func procLinux(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs /proc")
	}
	if _, err := exec.LookPath("setsid"); err != nil {
		t.Skip(err)
	}
}

func TestCase014ExitStatus(t *testing.T) {
	o := Options{Env: procMark(t)}
	rounds, mode := 1000, ""
	if o.CLI, o.PrefixArgs = "/bin/sh", []string{"-c", "printf 'one\\ntwo\\nthree\\n' >&2; exit 42"}; runtime.GOOS == "windows" {
		o.CLI, o.PrefixArgs = "", nil
		rounds, mode = 50, "exit42"
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Add(1)
		// Ends after its rounds; the test waits.
		go func() {
			defer wg.Done()
			for range rounds / 4 {
				p := procStart(t, o, mode)
				_, err := io.ReadAll(p.stdout)
				<-p.exited()
				e := p.exitError()
				if err != nil || e.State.ExitCode() != 42 || e.Stderr != "one\ntwo\nthree\n" {
					t.Errorf("got %v, %v, stderr %q", err, e.State, e.Stderr)
				}
				p.stdout.Close()
			}
		}()
	}
	wg.Wait()
}

func TestCase018StopLadder(t *testing.T) {
	procUnix(t)
	for _, tt := range []struct {
		mode  string
		grace time.Duration
		want  []string
		state string
	}{
		{"eof", 10 * time.Second, []string{"EOF"}, "exit status 0"},
		{"deaf", 300 * time.Millisecond, []string{"EOF", "TERM"}, "exit status 0"},
		{"stubborn", 300 * time.Millisecond, []string{"EOF", "TERM"}, "signal: killed"},
	} {
		t.Run(tt.mode, func(t *testing.T) {
			log := filepath.Join(t.TempDir(), "log")
			p := procStart(t, Options{Env: procMark(t, "PROC_LOG="+log)}, tt.mode)
			procReady(t, p)
			if err := p.end(procCtx(t), tt.grace, false); err != nil {
				t.Fatal(err)
			}
			if got := procLog(t, log); !slices.Equal(got, tt.want) {
				t.Errorf("child saw %v, want %v", got, tt.want)
			}
			if got := p.exitError().State.String(); got != tt.state {
				t.Errorf("state %q, want %q", got, tt.state)
			}
			if err := p.end(procCtx(t), tt.grace, false); err != nil {
				t.Errorf("second end: %v", err)
			}
		})
	}
}

func TestProcessConcurrentEnds(t *testing.T) {
	procUnix(t)
	p := procStart(t, Options{Env: procMark(t)}, "stubborn")
	procReady(t, p)
	errs := make(chan error)
	for i := range 20 {
		// Ends with its call; the test receives from it.
		go func() { errs <- p.end(procCtx(t), time.Duration(i)*10*time.Millisecond, false) }()
	}
	for range 20 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

func TestCase016DeadlineTooShort(t *testing.T) {
	procUnix(t)
	p := procStart(t, Options{Env: procMark(t)}, "stubborn")
	procReady(t, p)
	kill := p.kill
	p.kill = func() error { return nil } // says it did, and did not
	ctx, cancel := context.WithCancelCause(context.Background())
	why := errors.New("in a hurry")
	cancel(why)
	err := p.end(ctx, time.Minute, false)
	if !errors.Is(err, ErrNotConfirmed) || !errors.Is(err, context.Canceled) || !errors.Is(err, why) {
		t.Fatalf("got %v", err)
	}
	kill()
	if _, err := p.forceStop().Wait(procCtx(t)); err != nil {
		t.Fatal(err)
	}
}

func TestProcessCancelledEndKills(t *testing.T) {
	procUnix(t)
	p := procStart(t, Options{Env: procMark(t)}, "stubborn")
	procReady(t, p)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := p.end(ctx, time.Hour, false); err != nil {
		t.Fatal(err)
	}
	state, err := p.forceStop().Wait(procCtx(t))
	if err != nil || state.String() != "signal: killed" {
		t.Fatalf("got %v, %v", state, err)
	}
}

func TestProcessForceStopFromMany(t *testing.T) {
	procUnix(t)
	p := procStart(t, Options{Env: procMark(t)}, "stubborn")
	procReady(t, p)
	handles := make(chan *ForcedShutdown)
	for range 50 {
		// Ends with its call; the test receives from it.
		go func() { handles <- p.forceStop() }()
	}
	first := <-handles
	for range 49 {
		if f := <-handles; f != first {
			t.Error("two handles")
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := first.Wait(ctx); err != nil && (!errors.Is(err, ErrNotConfirmed) || !errors.Is(err, context.Canceled)) {
		t.Errorf("cancelled wait: %v", err)
	}
	state, err := first.Wait(procCtx(t))
	if err != nil || state.String() != "signal: killed" || first.PID() != state.Pid() {
		t.Errorf("got %v, %v", state, err)
	}
	if again, err := first.Wait(ctx); again != state || err != nil {
		t.Errorf("late wait: %v, %v", again, err)
	}
}

func TestProcessNone(t *testing.T) {
	f := noShutdown()
	<-f.Done()
	if state, err := f.Wait(context.Background()); state != nil || err != nil || f.PID() != 0 {
		t.Errorf("got %v, %v, %d", state, err, f.PID())
	}
}

func TestCase026NoSignalAfterReaping(t *testing.T) {
	p := procStart(t, Options{Env: procMark(t)}, "exit42")
	<-p.exited()
	p.mu.Lock()
	p.kill = func() error { t.Error("signal after the reaping"); return nil }
	p.mu.Unlock()
	for range 2 {
		state, err := p.forceStop().Wait(procCtx(t))
		if err != nil || state.ExitCode() != 42 {
			t.Errorf("got %v, %v", state, err)
		}
	}
	if !p.terminate() { // says yes, does nothing
		t.Error("terminate")
	}
}

func TestProcessRefusedSignal(t *testing.T) {
	procUnix(t)
	p := procStart(t, Options{Env: procMark(t)}, "eof")
	procReady(t, p)
	p.mu.Lock()
	p.kill = func() error { return os.NewSyscallError("kill", syscall.EPERM) }
	p.mu.Unlock()
	f := p.forceStop()
	check := func() {
		t.Helper()
		if state, err := f.Wait(procCtx(t)); state != nil || !errors.Is(err, ErrNotConfirmed) || !errors.Is(err, syscall.EPERM) {
			t.Errorf("got %v, %v", state, err)
		}
	}
	check()
	p.stdin.Close() // now it leaves by itself
	<-p.exited()
	check()
	if p.forceStop() != f {
		t.Error("another handle")
	}
}

func TestCase022StderrFlood(t *testing.T) {
	for _, tt := range []struct {
		name   string
		writer func(block chan struct{}) io.Writer
	}{
		{"none", func(chan struct{}) io.Writer { return nil }},
		{"panics", func(chan struct{}) io.Writer { return procWriter(func([]byte) (int, error) { panic("writer") }) }},
		{"exits", func(chan struct{}) io.Writer {
			return procWriter(func([]byte) (int, error) { runtime.Goexit(); return 0, nil })
		}},
		{"fails", func(chan struct{}) io.Writer {
			return procWriter(func([]byte) (int, error) { return 0, errors.New("full") })
		}},
		{"blocks", func(block chan struct{}) io.Writer {
			return procWriter(func(b []byte) (int, error) { <-block; return len(b), nil })
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			env := procMark(t)
			block := make(chan struct{})
			defer close(block)
			p := procStart(t, Options{Env: env, Stderr: tt.writer(block)}, "flood")
			procReady(t, p)
			if err := p.end(procCtx(t), 10*time.Second, false); err != nil {
				t.Fatal(err)
			}
			e := p.exitError()
			if !e.State.Success() || len(e.Stderr) != tailBytes || strings.Trim(e.Stderr, "x\n") != "" {
				t.Errorf("state %v, tail of %d bytes", e.State, len(e.Stderr))
			}
		})
	}
}

type procWriter func([]byte) (int, error)

func (f procWriter) Write(b []byte) (int, error) { return f(b) }

func TestProcessStderrCopy(t *testing.T) {
	var out bytes.Buffer // the end waits for the copy: no lock needed
	p := procStart(t, Options{Env: procMark(t), Stderr: &out}, "exit42")
	if err := p.end(procCtx(t), 10*time.Second, false); err != nil {
		t.Fatal(err)
	}
	if out.String() != "one\ntwo\nthree\n" {
		t.Errorf("got %q", out.String())
	}
}

func TestProcessCopierDrops(t *testing.T) {
	var out bytes.Buffer
	entered, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	c := newCopier(procWriter(func(b []byte) (int, error) {
		once.Do(func() { close(entered); <-release })
		return out.Write(b)
	}), nil)
	// Ends with finish; the test waits for done.
	go c.run()
	c.put([]byte("first\n"))
	<-entered
	c.put(bytes.Repeat([]byte("a"), queueBytes))
	c.put([]byte("lost"))
	c.put([]byte("lost too"))
	close(release)
	c.finish()
	<-c.done
	want := "first\n" + strings.Repeat("a", queueBytes) + "\n[copilot: 12 bytes of stderr dropped: the writer is too slow]\n"
	if out.String() != want {
		t.Errorf("got %d bytes ending in %q", out.Len(), out.String()[max(0, out.Len()-100):])
	}
}

func TestCase034StderrTail(t *testing.T) {
	const secret = "tok-0123456789"
	text := "\U0001F600e\u0301漢字\n"
	tail := &stderrTail{secrets: []string{secret}}
	for i := range len(text) {
		tail.write([]byte{text[i]})
	}
	if got := tail.String(); got != text {
		t.Errorf("byte by byte: %q", got)
	}
	// Every position of the cut, within a character and within a secret.
	unit := "漢" + secret + "\U0001F600|"
	for shift := range len(unit) {
		tail := &stderrTail{secrets: []string{secret, "tok"}}
		all := strings.Repeat(unit, 4*tailBytes/len(unit)) + strings.Repeat("e", shift)
		for i := 0; i < len(all); i += 7 {
			tail.write([]byte(all[i:min(len(all), i+7)]))
		}
		got := tail.String()
		if strings.ContainsRune(got, '\uFFFD') || len(got) > tailBytes || len(got) < tailBytes/2 {
			t.Fatalf("shift %d: %d bytes, begins %q", shift, len(got), got[:20])
		}
		for _, part := range []string{"0123", "789"} {
			if strings.Contains(got, part) {
				t.Fatalf("shift %d: secret shows in %q", shift, got[:40])
			}
		}
	}
	tail = &stderrTail{}
	tail.write([]byte("a\xffb"))
	if got := tail.String(); got != "a\uFFFDb" {
		t.Errorf("bad bytes: %q", got)
	}
}

// A shim dies of the TERM that its server needs some time to obey.
func TestProcessShimLeavesFirst(t *testing.T) {
	procLinux(t)
	log := filepath.Join(t.TempDir(), "log")
	p := procStart(t, Options{Transport: TCP, Env: procMark(t, "PROC_LOG="+log, "PROC_GRAND=slow")}, "shim")
	if _, err := p.listenPort(procCtx(t)); err != nil {
		t.Fatal(err)
	}
	if err := p.end(procCtx(t), 10*time.Second, false); err != nil {
		t.Fatal(err)
	}
	if got := procLog(t, log); !slices.Equal(got, []string{"TERM", "clean"}) {
		t.Errorf("server saw %v", got)
	}
	if got := p.exitError().State.String(); got != "signal: terminated" {
		t.Errorf("shim's state %q", got)
	}
}

func TestProcessFamily(t *testing.T) {
	procLinux(t)
	self, _ := os.Executable()
	odd := filepath.Join(t.TempDir(), "a) Z 1 (b") // what the system's list of processes shows
	if err := os.Symlink(self, odd); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ mode, grand string }{
		{"shim", "stubborn"},
		{"setsid", "stubborn"},
		{"setsid", "setsid,stubborn"},
		{"shim", "setsid,setsid,stubborn"},
	} {
		for _, how := range []string{"end", "force", "crash"} {
			if how == "crash" && tt.mode == "setsid" {
				continue // nothing tells whose the grandchild was
			}
			t.Run(tt.mode+" "+tt.grand+" "+how, func(t *testing.T) {
				p := procStart(t, Options{Env: procMark(t, "PROC_GRAND="+tt.grand, "PROC_SELF="+odd)}, tt.mode)
				procReady(t, p)
				switch how {
				case "end":
					if err := p.end(procCtx(t), 50*time.Millisecond, false); err != nil {
						t.Error(err)
					}
				case "force":
					if state, err := p.forceStop().Wait(procCtx(t)); err != nil || state.String() != "signal: killed" {
						t.Error(state, err)
					}
				case "crash":
					p.cmd.Process.Kill()
				}
				<-p.exited()
				// No waiting: the family went before its leader was reaped.
				if left := procFind(procMarkOf(p.cmd.Env)); len(left) > 0 {
					t.Errorf("still there: %v", left)
				}
			})
		}
	}
}

// Somebody who holds the pipes delays nothing, and what lies in them is still read.
func TestProcessPipesHeld(t *testing.T) {
	procLinux(t)
	for _, mode := range []string{"orphan", "orphan-out"} {
		t.Run(mode, func(t *testing.T) {
			p := procStart(t, Options{Env: procMark(t, "PROC_GRAND=quiet")}, mode)
			procReady(t, p)
			io.WriteString(p.stdin, "go\n")
			select {
			case <-p.exited():
			case <-procCtx(t).Done():
				t.Fatal("the exit is not published")
			}
			// Read late, to be sure: long after every deadline.
			p.stdout.(*lastPipe).f.SetReadDeadline(time.Unix(1, 0))
			got, err := io.ReadAll(p.stdout)
			if string(got) != "last words" || err != nil {
				t.Errorf("got %q, %v", got, err)
			}
			if e := p.exitError(); e.State.ExitCode() != 3 {
				t.Errorf("state %v", e.State)
			}
			if mode == "orphan-out" {
				for _, pid := range procFind(procMarkOf(p.cmd.Env)) {
					q, _ := os.FindProcess(pid)
					q.Kill()
				}
			}
		})
	}
}

// An endless writer cannot keep the reader for ever.
func TestProcessPipeChatter(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := r.SetReadDeadline(time.Unix(1, 0)); err != nil {
		t.Skip(err)
	}
	done := make(chan struct{})
	// Ends when r is closed; the test waits.
	go func() {
		defer close(done)
		for b := make([]byte, 4096); ; {
			if _, err := w.Write(b); err != nil {
				return
			}
		}
	}()
	n, err := io.Copy(io.Discard, &lastPipe{f: r})
	if err != nil || n < lateBytes {
		t.Errorf("read %d bytes, %v", n, err)
	}
	r.Close()
	<-done
	w.Close()
}

func TestCase013PortLine(t *testing.T) {
	long := strings.Repeat("some log line\n|", 200)
	for _, tt := range []struct {
		name, out string
		port      int
		quoted    string
	}{
		{"alone", "CLI server listening on port 4242\n", 4242, ""},
		{"log lines", long + "CLI server listening on port 4242\n", 4242, ""},
		{"CRLF", "CLI server Listening on port 4242\r\nmore\r\n", 4242, ""},
		{"long line", "BIG204800|\n|listening on port 4242\n", 4242, ""},
		{"split digits", "listening on port 4|2|42|\n", 4242, ""},
		{"split word", "漢\nlist|ening on po|rt 4242\n", 4242, ""},
		{"zero", "listening on port 0\n", 0, "listening on port 0"},
		{"too large", "listening on port 70000\n", 0, "port 70000"},
		{"no number", "x\nlistening on port 12x\n", 0, "port 12x"},
		{"long number", "listening on port 1|BIG500|\n", 0, "port 1zz"},
		{"nothing", "", 0, ""},
		{"garbage", "BIG5000|\n", 0, "zzz"},
		{"exit", "bye\n|EXIT", 0, "bye"},
		{"exit at once", "EXIT", 0, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			log := filepath.Join(t.TempDir(), "log")
			p := procStart(t, Options{Transport: TCP, ConnectionToken: "T", Env: procMark(t, "PROC_OUT="+tt.out, "PROC_LOG="+log)}, "print")
			ctx, cancel := context.WithCancel(procCtx(t))
			if tt.name == "nothing" || tt.name == "garbage" {
				procAwaitLog(t, log, "printed")
				cancel()
			}
			defer cancel()
			port, err := p.listenPort(ctx)
			if port != tt.port || (err == nil) != (tt.port != 0) {
				t.Fatalf("got %d, %v", port, err)
			}
			if err == nil {
				return
			}
			var exit *ExitError
			var listen *ListenError
			switch {
			case strings.HasPrefix(tt.name, "exit"):
				if !errors.As(err, &exit) || exit.State.ExitCode() != 5 {
					t.Errorf("got %v", err)
				}
			case !errors.As(err, &listen) || len(listen.Output) > quoteBytes || len(err.Error()) > 1024:
				t.Errorf("got %v", err)
			case tt.name == "garbage": // how much of it was read is a matter of time
			case !strings.Contains(listen.Output, tt.quoted):
				t.Errorf("quotes %q", listen.Output)
			}
			if ctx.Err() != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("no cancellation: %v", err)
			}
		})
	}
}

func TestCase089PortLineSecret(t *testing.T) {
	const secret = "0123456789"
	for pad := quoteBytes - 2*len(secret); pad < quoteBytes+len(secret); pad++ {
		s := portScanner{secrets: []string{secret}}
		s.write([]byte(strings.Repeat(secret, 9)+strings.Repeat("-", pad-9*len(secret))+secret), false)
		if got := s.error().Output; strings.Contains(got, "01") || len(got) > quoteBytes {
			t.Fatalf("pad %d: %q", pad, got)
		}
	}
}

func TestCase023StdoutFloodOverTCP(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	out := "listening on port 4242\n" + strings.Repeat("|BIG1048576|\n", 4)
	p := procStart(t, Options{Transport: TCP, Env: procMark(t, "PROC_OUT="+out, "PROC_LOG="+log)}, "print")
	if port, err := p.listenPort(procCtx(t)); port != 4242 {
		t.Fatal(port, err)
	}
	procAwaitLog(t, log, "printed")
}

func TestCase009SilentServerOverTCP(t *testing.T) {
	p := procStart(t, Options{Transport: TCP, Env: procMark(t)}, "quiet")
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	if _, err := p.listenPort(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

func TestCase017NoZombies(t *testing.T) {
	env := procMark(t)
	for i := range 50 {
		p := procStart(t, Options{Env: env}, []string{"eof", "exit42"}[i%2])
		if i%4 < 2 {
			if err := p.end(procCtx(t), 10*time.Second, false); err != nil {
				t.Fatal(err)
			}
		} else if _, err := p.forceStop().Wait(procCtx(t)); err != nil {
			t.Fatal(err)
		}
		p.stdout.Close()
	}
}

// procHost runs a program that uses the package, and gives the number of its child.
func procHost(t *testing.T, env []string) (*exec.Cmd, io.WriteCloser, int) {
	t.Helper()
	self, _ := os.Executable()
	host := exec.Command(self)
	host.Env = append(env, "COPILOT_TEST_CHILD=host")
	host.SysProcAttr = childAttr(true)
	in, err := host.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := host.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := host.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { host.Process.Kill(); host.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	pid, err2 := strconv.Atoi(strings.TrimSpace(strings.TrimPrefix(line, "ready ")))
	if err != nil || err2 != nil {
		t.Fatalf("host says %q, %v", line, err)
	}
	return host, in, pid
}

func TestCase024Interrupt(t *testing.T) {
	procUnix(t)
	log := filepath.Join(t.TempDir(), "log")
	host, in, _ := procHost(t, procMark(t, "PROC_GRAND=interrupt", "PROC_LOG="+log))
	if err := exec.Command("kill", "-INT", "--", "-"+strconv.Itoa(host.Process.Pid)).Run(); err != nil {
		t.Fatal(err)
	}
	io.WriteString(in, "stop\n")
	if err := host.Wait(); err != nil {
		t.Fatal(err)
	}
	if got := procLog(t, log); !slices.Equal(got, []string{"EOF"}) {
		t.Errorf("child saw %v", got)
	}
}

func TestCase025HostDies(t *testing.T) {
	procLinux(t)
	for _, tt := range []struct {
		name string
		vars []string
		want string
	}{
		{"stdio", []string{"PROC_GRAND=eof"}, "EOF"},
		{"stdio, shim", []string{"PROC_GRAND=shim,eof"}, "EOF"},
		{"tcp", []string{"PROC_GRAND=tcp", "PROC_TCP=1"}, "TERM"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			log := filepath.Join(t.TempDir(), "log")
			host, _, pid := procHost(t, procMark(t, append(tt.vars, "PROC_LOG="+log)...))
			if pid == 0 {
				t.Fatal("no child")
			}
			host.Process.Kill()
			host.Wait()
			procAwaitLog(t, log, tt.want)
			// That it is gone is for the leak check to see.
		})
	}
}

func TestCase087Directory(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	closed := filepath.Join(dir, "closed")
	if err := os.Mkdir(closed, 0); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, dir string
		want      error
	}{
		{"missing", filepath.Join(dir, "none"), fs.ErrNotExist},
		{"file", file, nil},
		{"no permission", closed, fs.ErrPermission},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.want == fs.ErrPermission && (os.Getuid() <= 0) {
				t.Skip("no permission is ever missing")
			}
			_, err := newCommand(&Options{Dir: tt.dir, CLI: filepath.Join(dir, "no-cli")})
			var pe *fs.PathError
			if !errors.Is(err, ErrInvalidConfig) || !errors.As(err, &pe) || !strings.Contains(err.Error(), strconv.Quote(tt.dir)) {
				t.Errorf("got %v", err)
			}
			if tt.want != nil && !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
		})
	}
	_, err := newCommand(&Options{Dir: dir, CLI: filepath.Join(dir, "no-cli")})
	if !errors.Is(err, ErrCLINotFound) || !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "no-cli") {
		t.Errorf("missing CLI: %v", err)
	}
}

func TestProcessInvalidOptions(t *testing.T) {
	self, _ := os.Executable()
	for name, o := range map[string]Options{
		"port":          {Transport: TCP, Port: 65536},
		"negative port": {Transport: TCP, Port: -1},
		"port, stdio":   {Port: 1},
		"token, stdio":  {ConnectionToken: "x"},
		"transport":     {Transport: 7},
		"mode":          {Mode: 7},
		"idle timeout":  {SessionIdleTimeout: -1},
		"grace":         {StopGrace: -1},
		"NUL in Args":   {Args: []string{"a\x00b"}},
		"NUL in Env":    {Env: []string{"A=a\x00b"}},
		"NUL in token":  {GitHubToken: "a\x00b"},
	} {
		o.CLI = self
		if _, err := newCommand(&o); !errors.Is(err, ErrInvalidConfig) || strings.ContainsRune(err.Error(), 0) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestProcessArguments(t *testing.T) {
	self, _ := os.Executable()
	yes, no := true, false
	for _, tt := range []struct {
		name string
		o    Options
		want string
	}{
		{"zero", Options{}, "--headless --no-auto-update --stdio"},
		{"tcp", Options{Transport: TCP, ConnectionToken: "T"}, "--headless --no-auto-update"},
		{"all", Options{Transport: TCP, Port: 81, PrefixArgs: []string{"pre"}, Args: []string{"post"}, LogLevel: "debug",
			GitHubToken: "T", SessionIdleTimeout: 1500 * time.Millisecond, RemoteSessions: true},
			"pre --headless --no-auto-update --log-level debug --port 81 --auth-token-env COPILOT_SDK_AUTH_TOKEN --no-auto-login --session-idle-timeout 2 --remote post"},
		{"short timeout", Options{SessionIdleTimeout: 1}, "--headless --no-auto-update --stdio --session-idle-timeout 1"},
		{"login", Options{UseLoggedInUser: &no}, "--headless --no-auto-update --stdio --no-auto-login"},
		{"token and login", Options{GitHubToken: "T", UseLoggedInUser: &yes}, "--headless --no-auto-update --stdio --auth-token-env COPILOT_SDK_AUTH_TOKEN"},
	} {
		tt.o.CLI = self
		c, err := newCommand(&tt.o)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(c.args, " "); got != tt.want {
			t.Errorf("%s:\n got %s\nwant %s", tt.name, got, tt.want)
		}
	}
}

func TestCase088Environment(t *testing.T) {
	capture := true
	all := Options{
		Transport: TCP, ConnectionToken: "conn", GitHubToken: "gh", BaseDir: t.TempDir(), Mode: ModeEmpty,
		Telemetry: &Telemetry{Endpoint: "http://e", Protocol: "http/json", FilePath: "f", Exporter: "file", SourceName: "s", CaptureContent: &capture},
	}
	want := []string{
		"COPILOT_SDK_AUTH_TOKEN=gh", "COPILOT_CONNECTION_TOKEN=conn", "COPILOT_HOME=" + all.BaseDir, "COPILOT_DISABLE_KEYTAR=1",
		"COPILOT_OTEL_ENABLED=true", "OTEL_EXPORTER_OTLP_ENDPOINT=http://e", "OTEL_EXPORTER_OTLP_PROTOCOL=http/json",
		"COPILOT_OTEL_FILE_EXPORTER_PATH=f", "COPILOT_OTEL_EXPORTER_TYPE=file", "COPILOT_OTEL_SOURCE_NAME=s",
		"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true",
	}
	t.Setenv("PROC_HOST", "inherited")
	t.Setenv("COPILOT_TEST_CHILD", "env")
	t.Setenv("GORACE", "atexit_sleep_ms=0")
	childEnv := func(o Options) []string {
		t.Helper()
		self, _ := os.Executable()
		o.CLI = self
		o.Transport, o.ConnectionToken = Stdio, "" // to have its stdout
		c, err := newCommand(&o)
		if err != nil {
			t.Fatal(err)
		}
		p, err := c.start()
		if err != nil {
			t.Fatal(err)
		}
		defer p.stdout.Close()
		var got [2][]string
		if err := json.NewDecoder(p.stdout).Decode(&got); err != nil {
			t.Fatal(err)
		}
		if err := p.end(procCtx(t), 10*time.Second, false); err != nil {
			t.Fatal(err)
		}
		return got[1]
	}
	without := func(in []string, s string) []string {
		return slices.DeleteFunc(slices.Clone(in), func(x string) bool { return x == s })
	}
	wantStdio := without(want, "COPILOT_CONNECTION_TOKEN=conn")

	got := childEnv(all)
	if slices.Index(got, "PROC_HOST=inherited") < 0 {
		t.Error("nil Env does not inherit")
	}
	for _, kv := range wantStdio {
		if !slices.Contains(got, kv) {
			t.Errorf("nil Env: no %s", kv)
		}
	}

	mine := []string{"A=1", "COPILOT_HOME=mine", "A=2", "COPILOT_TEST_CHILD=env"}
	if runtime.GOOS == "windows" {
		mine = append(mine, "SYSTEMROOT="+os.Getenv("SYSTEMROOT"))
	}
	all.Env = slices.Clone(mine)
	got = childEnv(all)
	wantStdio = append(wantStdio, "A=2")
	wantStdio = append(wantStdio, mine[3:]...)
	slices.Sort(got)
	slices.Sort(wantStdio)
	if !slices.Equal(got, wantStdio) {
		t.Errorf("got  %q\nwant %q", got, wantStdio)
	}
	if !slices.Equal(all.Env, mine) {
		t.Errorf("the caller's slice changed: %q", all.Env)
	}

	self, _ := os.Executable()
	all.CLI = self
	c, err := newCommand(&all)
	if err != nil || !slices.Contains(c.env, "COPILOT_CONNECTION_TOKEN=conn") {
		t.Errorf("no connection token over TCP: %v", err)
	}
	all.CLI, all.Env = "", []string{"COPILOT_CLI_PATH=" + self}
	if c, err := newCommand(&all); err != nil || c.path != self {
		t.Errorf("COPILOT_CLI_PATH of Env: %v", err)
	}
	all.Env = []string{"COPILOT_CLI_PATH=" + self + "-none", "PATH=" + filepath.Dir(self)}
	if _, err := newCommand(&all); !errors.Is(err, ErrCLINotFound) || !strings.Contains(err.Error(), "COPILOT_CLI_PATH") {
		t.Errorf("bad COPILOT_CLI_PATH: %v", err)
	}
}

func TestCase089Secrets(t *testing.T) {
	const token, inherited = "ghs_secretsecret", "gho_othersecret"
	self, _ := os.Executable()
	o := &Options{CLI: self, GitHubToken: token, Args: []string{"--x=" + token, "a b"},
		Env: procMark(t, "COPILOT_TEST_CHILD=errprint", "GH_TOKEN="+inherited, "PROC_OUT=bad "+token+" and "+inherited+"\n")}
	c, err := newCommand(o)
	if err != nil {
		t.Fatal(err)
	}
	if s := c.String(); strings.Contains(s, token) || !strings.Contains(s, `"a b"`) || !strings.Contains(s, "--headless") {
		t.Errorf("command: %s", s)
	}
	if s := strings.Join(c.args[:len(c.args)-2], " "); strings.Contains(s, token) {
		t.Errorf("argv: %s", s)
	}
	p, err := c.start()
	if err != nil {
		t.Fatal(err)
	}
	defer p.stdout.Close()
	<-p.exited()
	if got := p.exitError().Stderr; got != "bad [redacted] and [redacted]\n" {
		t.Errorf("stderr: %q", got)
	}
	c.path += "-none"
	if _, err := c.start(); !errors.Is(err, fs.ErrNotExist) || strings.Contains(err.Error(), token) {
		t.Errorf("failed start: %v", err)
	}
}

func TestCase085Lookup(t *testing.T) {
	const npm = `C:\npm & co\`
	const loader = npm + `node_modules\@github\copilot\npm-loader.js`
	const node = `C:\node js\node.exe`
	win := func(path string) *lookup { return &lookup{goos: "windows", path: path, pathExt: ".COM;.EXE;.BAT;.CMD"} }
	unix := func(path string) *lookup { return &lookup{goos: "linux", path: path} }
	const dirs = `C:\npm & co;C:\node js;C:\bin`
	for _, tt := range []struct {
		name  string
		l     *lookup
		cli   string
		files []string
		want  []string // program and arguments
		err   error
		text  string
	}{
		{"exe", win(dirs), "copilot", []string{`C:\bin\copilot.EXE`}, []string{`C:\bin\copilot.EXE`}, nil, ""},
		{"cmd of npm, global", win(dirs), "copilot", []string{npm + "copilot", npm + "copilot.ps1", npm + "copilot.CMD", loader, node[:len(node)-3] + "EXE"}, []string{node[:len(node)-3] + "EXE", loader}, nil, ""},
		{"cmd of npm, project", win(dirs), `C:\p\node_modules\.bin\copilot.cmd`,
			[]string{`C:\p\node_modules\.bin\copilot.cmd`, `C:\p\node_modules\.bin\..\@github\copilot\npm-loader.js`, `C:\bin\node.EXE`},
			[]string{`C:\bin\node.EXE`, `C:\p\node_modules\.bin\..\@github\copilot\npm-loader.js`}, nil, ""},
		{"cmd of somebody", win(dirs), "copilot", []string{`C:\bin\copilot.CMD`}, []string{`C:\bin\copilot.CMD`}, nil, ""},
		{"ps1 of npm", win(dirs), npm + "copilot.ps1", []string{npm + "copilot.ps1", loader, `C:\bin\node.EXE`}, []string{`C:\bin\node.EXE`, loader}, nil, ""},
		{"ps1 of somebody", win(dirs), `C:\bin\copilot.ps1`, []string{`C:\bin\copilot.ps1`}, nil, nil, "PowerShell"},
		{"js", win(dirs), `C:\x\index.js`, []string{`C:\x\index.js`, `C:\bin\node.EXE`}, []string{`C:\bin\node.EXE`, `C:\x\index.js`}, nil, ""},
		{"path without suffix", win(dirs), `C:\x\copilot`, []string{`C:\x\copilot.EXE`, `C:\x\copilot`}, []string{`C:\x\copilot.EXE`}, nil, ""},
		{"sh script only", win(dirs), "copilot", []string{npm + "copilot"}, nil, exec.ErrNotFound, `"copilot" is not in PATH`},
		{"current directory", win(dirs), "copilot", []string{`.\copilot.EXE`, `C:\bin\copilot.EXE`}, nil, exec.ErrDot, "copilot"},
		{"relative in PATH", win(`tools;C:\bin`), "copilot", []string{`tools\copilot.EXE`}, nil, exec.ErrDot, "tools"},
		{"none", win(dirs), "copilot", nil, nil, exec.ErrNotFound, "npm"},
		{"no path at all", win(""), `C:\x\copilot.exe`, nil, nil, fs.ErrNotExist, "copilot.exe"},

		{"unix", unix("/a:/b"), "copilot", []string{"/b/copilot"}, []string{"/b/copilot"}, nil, ""},
		{"unix none", unix("/a:/b"), "copilot", nil, nil, exec.ErrNotFound, "/a:/b"},
		{"unix empty element", unix("/a::/b"), "copilot", []string{"./copilot", "/b/copilot"}, nil, exec.ErrDot, "copilot"},
		{"unix js", unix("/a:/b"), "/x/index.mjs", []string{"/x/index.mjs", "/b/node"}, []string{"/b/node", "/x/index.mjs"}, nil, ""},
		{"unix js without node", unix("/a"), "/x/index.js", []string{"/x/index.js"}, nil, exec.ErrNotFound, `"node"`},
		{"unix cmd is a name like any", unix("/a"), "/x/c.cmd", []string{"/x/c.cmd"}, []string{"/x/c.cmd"}, nil, ""},
		{"missing path", unix("/a"), "/x/copilot", nil, nil, fs.ErrNotExist, "/x/copilot"},
		{"not executable", unix("/a"), "copilot", []string{"/a/copilot!"}, nil, fs.ErrPermission, "/a/copilot"},

		{"script", unix("/a:/b"), "/x/copilot", []string{"/x/copilot#!/usr/bin/env node", "/b/node"}, []string{"/x/copilot"}, nil, ""},
		{"script with env's options", unix("/b"), "/x/copilot", []string{"/x/copilot#!/usr/bin/env -S A=b node --x", "/b/node"}, []string{"/x/copilot"}, nil, ""},
		{"script of a missing one", unix("/b"), "/x/copilot", []string{"/x/copilot#!/opt/node"}, nil, fs.ErrNotExist, "/opt/node"},
		{"script of nobody", unix("/b"), "/x/copilot", []string{"/x/copilot#!"}, []string{"/x/copilot"}, nil, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			heads, denied := map[string]string{}, map[string]bool{}
			for _, f := range tt.files {
				name, line, script := strings.Cut(f, "#!")
				if script {
					line = "#!" + line + "\nrest"
				}
				if n, ok := strings.CutSuffix(name, "!"); ok {
					name, denied[n] = n, true
				}
				heads[name] = line
			}
			tt.l.abs = func(s string) (string, error) { return s, nil }
			tt.l.head = func(s string) string { return heads[s] }
			tt.l.file = func(s string, exec bool) error {
				if _, ok := heads[s]; !ok {
					return &fs.PathError{Op: "stat", Path: s, Err: fs.ErrNotExist}
				}
				if exec && denied[s] {
					return &fs.PathError{Op: "run", Path: s, Err: fs.ErrPermission}
				}
				return nil
			}
			program, args, err := tt.l.resolve(tt.cli)
			if tt.want == nil {
				if err == nil || tt.err != nil && !errors.Is(err, tt.err) || !strings.Contains(err.Error(), tt.text) {
					t.Errorf("got %s %q, %v", program, args, err)
				}
				return
			}
			if got := append([]string{program}, args...); err != nil || !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got %q, %v\nwant %q", got, err, tt.want)
			}
		})
	}
	for _, arg := range []string{"a&b", `"`, "%PATH%", "a\nb", "^"} {
		if !unsafeInBatch(arg) {
			t.Errorf("%q is safe", arg)
		}
	}
}

func TestCase086MissingInterpreter(t *testing.T) {
	procUnix(t)
	dir := t.TempDir()
	script := filepath.Join(dir, "copilot")
	if err := os.WriteFile(script, []byte("#!/usr/bin/env node\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	_, err := newCommand(&Options{Env: []string{"PATH=" + dir}})
	if !errors.Is(err, ErrCLINotFound) || !strings.Contains(err.Error(), `"node"`) || strings.Contains(err.Error(), script) {
		t.Errorf("got %v", err)
	}
}

func TestCase013Addresses(t *testing.T) {
	for in, want := range map[string]string{
		"8080":                   "127.0.0.1:8080",
		"localhost:8080":         "127.0.0.1:8080",
		"[::1]:8080":             "[::1]:8080",
		"http://[::1]:8080":      "[::1]:8080",
		"http://localhost:8080/": "127.0.0.1:8080",
		"https://h.example:1":    "h.example:1",
		"10.0.0.1:65535":         "10.0.0.1:65535",
		"::1":                    "",
		"host:0":                 "",
		"host:99999":             "",
		"host:http":              "",
		"":                       "",
		"0":                      "",
		"-1":                     "",
		"+80":                    "",
		"host":                   "",
		":8080":                  "",
		"http://host":            "",
		"http://u:p@host:1":      "",
		"http://host:1/path":     "",
		"ftp://host:1":           "",
		"ho st:1":                "",
		"[::1]":                  "",
		"a:b:1":                  "",
	} {
		got, err := parseAddr(in)
		if got != want || (err == nil) != (want != "") || err != nil && !errors.Is(err, ErrInvalidConfig) {
			t.Errorf("parseAddr(%q) = %q, %v; want %q", in, got, err, want)
		}
	}
}

// procRealCLI gives the CLIs to test with: the one that is named, and npm's shim for it if that is where npm puts it.
func procRealCLI(t *testing.T) map[string]string {
	cli := os.Getenv("COPILOT_CLI_PATH")
	if cli == "" {
		t.Skip("COPILOT_CLI_PATH is not set")
	}
	all := map[string]string{"native": cli}
	shim := filepath.Join(filepath.Dir(cli), "..", "..", ".bin", "copilot")
	if _, err := os.Stat(shim); err == nil {
		all["shim"] = shim
	}
	return all
}

// procRealEnv gives the real CLI directories of its own.
func procRealEnv(t *testing.T) []string {
	home := t.TempDir()
	cache := os.Getenv("XDG_CACHE_HOME")
	if cache == "" {
		cache = filepath.Join(os.TempDir(), "clicache") // filled once, with much
	}
	return procMark(t, "HOME="+home, "COPILOT_HOME="+home, "XDG_CACHE_HOME="+cache, "COPILOT_CLI_PATH=")
}

// procRPC is just enough of the protocol to have the CLI run a shell command.
type procRPC struct {
	t  *testing.T
	r  *bufio.Reader
	w  io.Writer
	id int
}

func (c *procRPC) call(method, params string) {
	c.t.Helper()
	c.id++
	body := fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":%q,"params":%s}`, c.id, method, params)
	if _, err := fmt.Fprintf(c.w, "Content-Length: %d\r\n\r\n%s", len(body), body); err != nil {
		c.t.Fatal(err)
	}
	for {
		header, err := c.r.ReadString('\n')
		if err != nil {
			c.t.Fatalf("%s: %v", method, err)
		}
		n, _ := strconv.Atoi(strings.TrimSpace(strings.TrimPrefix(header, "Content-Length:")))
		c.r.ReadString('\n')
		body := make([]byte, n)
		if _, err := io.ReadFull(c.r, body); err != nil {
			c.t.Fatalf("%s: %v", method, err)
		}
		var m struct {
			ID     int
			Method string
			Error  json.RawMessage
		}
		if json.Unmarshal(body, &m); m.ID == c.id && m.Method == "" {
			if m.Error != nil {
				c.t.Fatalf("%s: %s", method, m.Error)
			}
			return
		}
	}
}

// procSleep has the CLI run a shell command that takes for ever, and returns when it runs.
func procSleep(t *testing.T, rw io.ReadWriter, mark string) {
	t.Helper()
	model := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, `data: {"id":"1","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"finish_reason":null,"delta":`+
			`{"role":"assistant","tool_calls":[{"index":0,"id":"c1","type":"function","function":{"name":"bash",`+
			`"arguments":"{\"command\":\"sleep 300\",\"description\":\"d\"}"}}]}}]}`+"\n\n"+
			`data: {"id":"1","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"finish_reason":"tool_calls","delta":{}}]}`+"\n\ndata: [DONE]\n\n")
	}))
	t.Cleanup(model.Close)
	c := &procRPC{t: t, r: bufio.NewReader(rw), w: rw}
	const id = `"sessionId":"00000000-0000-4000-8000-000000000001"`
	c.call("connect", `{}`)
	c.call("session.create", fmt.Sprintf(`{%s,"model":"m","provider":{"type":"openai","wireApi":"completions","baseUrl":"%s/v1","apiKey":"k"},"requestPermission":true,"streaming":true,"workingDirectory":%q}`, id, model.URL, t.TempDir()))
	c.call("session.permissions.setApproveAll", `{`+id+`,"enabled":true}`)
	c.call("session.send", `{`+id+`,"prompt":"go"}`)
	for ctx := procCtx(t); ; {
		for _, pid := range procFind(mark) {
			if comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); string(comm) == "sleep\n" {
				return
			}
		}
		select {
		case <-ctx.Done():
			t.Fatal("no command runs")
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func procMarkOf(env []string) string {
	i := slices.IndexFunc(env, func(kv string) bool { return strings.HasPrefix(kv, "PROC_MARK=") })
	return env[i]
}

func TestProcessRealCLI(t *testing.T) {
	procLinux(t)
	for name, cli := range procRealCLI(t) {
		for _, transport := range []Transport{Stdio, TCP} {
			for _, busy := range []bool{false, true} {
				for _, how := range []string{"end", "force", "crash"} {
					t.Run(fmt.Sprintf("%s %d busy=%v %s", name, transport, busy, how), func(t *testing.T) {
						if how == "crash" && busy && name == "native" {
							t.Skip("nothing tells whose the command was")
						}
						env := procRealEnv(t)
						c, err := newCommand(&Options{CLI: cli, Env: env, Transport: transport})
						if err != nil {
							t.Fatal(err)
						}
						p, err := c.start()
						if err != nil {
							t.Fatal(err)
						}
						defer p.stdout.Close()
						defer p.forceStop()
						var rw io.ReadWriter = struct {
							io.Reader
							io.Writer
						}{p.stdout, p.stdin}
						if transport == TCP {
							port, err := p.listenPort(procCtx(t))
							if err != nil {
								t.Fatal(err)
							}
							conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
							if err != nil {
								t.Fatal(err)
							}
							defer conn.Close()
							rw = conn
						}
						if busy {
							procSleep(t, rw, procMarkOf(env))
						} else {
							(&procRPC{t: t, r: bufio.NewReader(rw), w: rw}).call("connect", `{}`)
						}
						start := time.Now()
						switch how {
						case "end":
							if err := p.end(procCtx(t), 5*time.Second, false); err != nil {
								t.Error(err)
							}
						case "force":
							if _, err := p.forceStop().Wait(procCtx(t)); err != nil {
								t.Error(err)
							}
						case "crash":
							p.cmd.Process.Kill()
						}
						<-p.exited()
						t.Logf("%v in %v", p.exitError().State, time.Since(start).Round(time.Millisecond))
						if left := procFind(procMarkOf(env)); len(left) > 0 {
							t.Errorf("still there: %v", left)
						}
					})
				}
			}
		}
	}
}

func TestProcessRealCLIHostDies(t *testing.T) {
	procLinux(t)
	for name, cli := range procRealCLI(t) {
		for _, transport := range []string{"", "PROC_TCP=1"} {
			t.Run(name+" "+transport, func(t *testing.T) {
				if name == "shim" && transport != "" {
					t.Skip("known: the shim does not pass the signal on")
				}
				env := procRealEnv(t)
				host, _, _ := procHost(t, append(env, transport, "PROC_CLI="+cli, "PROC_GRAND="))
				host.Process.Kill()
				host.Wait()
				for ctx := procCtx(t); len(procFind(procMarkOf(env))) > 0; {
					select {
					case <-ctx.Done():
						t.Fatal("still there")
					case <-time.After(10 * time.Millisecond):
					}
				}
			})
		}
	}
}
