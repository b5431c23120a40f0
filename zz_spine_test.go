package copilot

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"iter"
	"log/slog"
	"math/rand"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/iotest"
	"time"
)

// ---- the test binary as a CLI ----

// spineScript is what a child that plays the CLI does. It answers every request with {} where On says nothing, and leaves after
// runtime.shutdown, at the end of its input and on SIGTERM.
type spineScript struct {
	TCP        bool              // serve a port, announced on stdout
	Stderr     string            // written first
	Print      string            // then, on stdout
	Logs       int               // then, bytes of log lines on stdout
	Flood      int               // bytes on stderr before each answer
	On         map[string]string // by method: "result JSON", "error JSON", "raw TEXT", "silent", "close" (stdout), "exit CODE", "finish" (slowly)
	IgnoreEOF  bool
	IgnoreTERM bool
	Log        string // file that gets a line for each request, EOF and TERM
}

func spineChild(encoded string) int {
	var s spineScript
	if err := json.Unmarshal([]byte(encoded), &s); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 99
	}
	note := func(what string) {
		if f, err := os.OpenFile(s.Log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600); err == nil {
			fmt.Fprintln(f, what)
			f.Close()
		}
	}
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	// Ends with the program.
	go func() {
		<-term
		note("TERM")
		if !s.IgnoreTERM {
			os.Exit(0)
		}
	}()
	os.Stderr.WriteString(s.Stderr)
	os.Stdout.WriteString(s.Print)
	in, out := io.Reader(os.Stdin), io.Writer(os.Stdout)
	if s.TCP {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 98
		}
		fmt.Printf("CLI server listening on port %d\n", l.Addr().(*net.TCPAddr).Port)
		for n := 0; n < s.Logs; n += 1001 {
			fmt.Println(strings.Repeat("l", 1000))
		}
		conn, err := l.Accept()
		if err != nil {
			return 97
		}
		in, out = conn, conn
	}
	stay := func() { <-time.After(time.Minute) } // a stray child ends by itself
	r := bufio.NewReader(in)
	for {
		body, err := spineReadFrame(r)
		if err != nil {
			note("EOF")
			if s.IgnoreEOF {
				stay()
			}
			return 0
		}
		var m peerMessage
		if json.Unmarshal(body, &m) != nil || m.Method == "" {
			continue
		}
		note(m.Method)
		answer := func(member, value string) {
			for n := 0; n < s.Flood; n += 1000 {
				os.Stderr.WriteString(strings.Repeat("e", 999) + "\n")
			}
			body := fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"%s":%s}`, m.ID, member, value)
			fmt.Fprintf(out, "Content-Length: %d\r\n\r\n%s", len(body), body)
		}
		action, rest, _ := strings.Cut(s.On[m.Method], " ")
		switch action {
		case "result", "error":
			answer(action, rest)
		case "raw":
			io.WriteString(out, rest)
		case "silent":
		case "close":
			os.Stdout.Close()
		case "exit":
			code, _ := strconv.Atoi(rest)
			return code
		case "finish":
			answer("result", "null")
			<-time.After(300 * time.Millisecond) // what it does meanwhile must not be cut off
			note("finished")
			return 0
		case "":
			switch m.Method {
			case "connect":
				answer("result", `{"ok":true,"protocolVersion":3,"version":"1.0.102"}`)
			case "runtime.shutdown":
				answer("result", "null")
				return 0
			case "session.create", "session.resume":
				id, _ := json.Marshal(m.get("sessionId"))
				answer("result", fmt.Sprintf(`{"sessionId":%s}`, id))
			default:
				answer("result", "{}")
			}
		}
	}
}

var spineHeader = regexp.MustCompile(`^Content-Length: ([0-9]+)\r\n$`)

// spineReadFrame is a reader that forgives nothing.
func spineReadFrame(r *bufio.Reader) ([]byte, error) {
	line, err := r.ReadString('\n')
	if err != nil {
		return nil, err
	}
	m := spineHeader.FindStringSubmatch(line)
	if m == nil {
		return nil, fmt.Errorf("header %q", line)
	}
	if line, err = r.ReadString('\n'); err != nil || line != "\r\n" {
		return nil, fmt.Errorf("no blank line: %q, %v", line, err)
	}
	n, _ := strconv.Atoi(m[1])
	body := make([]byte, n)
	_, err = io.ReadFull(r, body)
	return body, err
}

// spineOptions are the options that start a child with this script.
func spineOptions(t testing.TB, s spineScript) *Options {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	encoded, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	o := &Options{
		CLI: self,
		// A child built with the race detector would sleep for a second before it leaves.
		Env:       append(os.Environ(), "COPILOT_TEST_CHILD=spine:"+string(encoded), "GORACE=atexit_sleep_ms=0"),
		StopGrace: patience,
	}
	if s.TCP {
		o.Transport = TCP
	}
	return o
}

func spineStart(t testing.TB, o *Options) *Client {
	t.Helper()
	c, err := Start(testContext(t), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.ForceStop()
		await(t, "client's end", c.Done())
	})
	return c
}

// spineKids lists this process's children, zombies included, where the system has /proc.
func spineKids() (pids []int) {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, name := range stats {
		b, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
		if len(fields) > 1 && fields[1] == strconv.Itoa(os.Getpid()) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(name)))
			pids = append(pids, pid)
		}
	}
	return pids
}

// spineFlat fails the test when it leaves a child, a goroutine or a descriptor.
func spineFlat(t testing.TB) {
	t.Helper()
	// The poller's own descriptors are opened once.
	if r, w, err := os.Pipe(); err == nil {
		r.Close()
		w.Close()
	}
	leakCheck(t)
	t.Cleanup(func() {
		if kids := spineKids(); len(kids) > 0 {
			t.Errorf("children left: %v", kids)
		}
	})
}

// spineRounds is how often a race is tried: a fortieth of n unless COPILOT_TEST_ROUNDS asks for all.
func spineRounds(n int) int {
	if os.Getenv("COPILOT_TEST_ROUNDS") == "all" {
		return n
	}
	return max(1, n/40)
}

func spineLog(t testing.TB, file string) []string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return strings.Fields(string(b))
}

func TestCase009SilentStart(t *testing.T) {
	for _, tt := range []struct {
		name   string
		o      *Options
		script spineScript
		phase  string
	}{
		{"stdio", &Options{}, spineScript{On: map[string]string{"connect": "silent"}}, "handshake"},
		{"TCP", &Options{}, spineScript{TCP: true, On: map[string]string{"connect": "silent"}}, "handshake"},
		{"no port", &Options{Transport: TCP}, spineScript{IgnoreEOF: true}, "port"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			spineFlat(t)
			o := spineOptions(t, tt.script)
			o.Transport = max(o.Transport, tt.o.Transport)
			why := errors.New("enough")
			// Long enough for the child to come as far as its phase, on a slow machine too.
			ctx, cancel := context.WithTimeoutCause(context.Background(), time.Second, why)
			defer cancel()
			c, err := Start(ctx, o)
			if c != nil || !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, why) || !strings.Contains(err.Error(), tt.phase) {
				t.Errorf("got %v", err)
			}
			if kids := spineKids(); len(kids) > 0 {
				t.Errorf("children when Start returned: %v", kids)
			}
		})
	}
}

func TestCase011StartStopRaces(t *testing.T) {
	spineFlat(t)
	o := spineOptions(t, spineScript{})
	var clients sync.WaitGroup
	for range spineRounds(300) {
		c, err := Start(testContext(t), o)
		if err != nil {
			t.Fatal(err)
		}
		delay := func() { <-time.After(time.Duration(rand.Intn(5000)) * time.Microsecond) } // where the race is lost, not what is waited for
		for _, f := range []func() error{
			func() error { return c.Stop(testContext(t)) },
			func() error { _, err := c.ForceStopAndWait(testContext(t)); return err },
			func() error { return c.Stop(testContext(t)) },
			func() error { _, err := c.CreateSession(testContext(t), nil); return err },
			func() error { return c.Call(testContext(t), "work", nil, nil) },
		} {
			clients.Add(1)
			// Ends with its call; the round waits.
			go func() {
				defer clients.Done()
				delay()
				if err := f(); err != nil && !errors.Is(err, ErrClosed) && !errors.Is(err, ErrNotConfirmed) {
					t.Errorf("got %v", err)
				}
			}()
		}
		clients.Wait()
		await(t, "client's end", c.Done())
		if err := c.Err(); err != ErrClosed {
			t.Errorf("Err is %v", err)
		}
		if kids := spineKids(); len(kids) > 0 {
			t.Fatalf("children after a round: %v", kids)
		}
		for _, err := range []error{c.Call(testContext(t), "work", nil, nil), func() error { _, err := c.CreateSession(testContext(t), nil); return err }()} {
			if !errors.Is(err, ErrClosed) {
				t.Errorf("a call after the end: %v", err)
			}
		}
	}
}

func TestCase012FailedHandshake(t *testing.T) {
	is := func(target error) func(error) bool { return func(err error) bool { return errors.Is(err, target) } }
	for _, tt := range []struct {
		name, connect string
		is            func(error) bool
	}{
		{"version", `result {"protocolVersion":4}`, func(err error) bool {
			var p *ProtocolError
			return errors.As(err, &p) && p.Server == 4
		}},
		{"refused", `error {"code":-32002,"message":"wrong token"}`, is(ErrAuthentication)},
		{"error", `error {"code":-32603,"message":"no"}`, func(err error) bool {
			var r *RPCError
			return errors.As(err, &r) && r.Code == -32603 && r.Message == "no"
		}},
		{"garbage", "raw Update available!\n", func(err error) bool {
			var f *FrameError
			return errors.As(err, &f) && f.Quote == "Update available!\n"
		}},
		{"not JSON", "raw Content-Length: 5\r\n\r\n{oops", func(err error) bool {
			var f *FrameError
			return errors.As(err, &f) && f.Quote == "{oops"
		}},
		{"stdout closed", "close", is(io.ErrUnexpectedEOF)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			spineFlat(t)
			o := spineOptions(t, spineScript{On: map[string]string{"connect": tt.connect}, IgnoreEOF: true, IgnoreTERM: true})
			c, err := Start(testContext(t), o)
			if kids := spineKids(); len(kids) > 0 {
				t.Errorf("children when Start returned: %v", kids)
			}
			if c != nil || !tt.is(err) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestCase014ExitStatusOfClient(t *testing.T) {
	spineFlat(t)
	const words = "one\ntwo\nthree\n"
	check := func(what string, err error) {
		t.Helper()
		var e *ExitError
		if !errors.As(err, &e) || e.State.ExitCode() != 42 || e.Stderr != words || !strings.Contains(err.Error(), "three") {
			t.Errorf("%s: %v", what, err)
		}
	}
	for range spineRounds(1000) {
		_, err := Start(testContext(t), spineOptions(t, spineScript{Stderr: words, On: map[string]string{"connect": "exit 42"}}))
		check("handshake", err)
	}
	o := spineOptions(t, spineScript{Stderr: words, On: map[string]string{"work": "exit 42"}})
	for range spineRounds(1000) {
		c, err := Start(testContext(t), o)
		if err != nil {
			t.Fatal(err)
		}
		s := createSession(t, c, nil)
		sub, notices := s.Subscribe(), c.SubscribeLifecycle()
		check("call", c.Call(testContext(t), "work", nil, nil))
		await(t, "client's end", c.Done())
		check("Err", c.Err())
		_, err = sub.Next(testContext(t))
		check("sequence", err)
		_, err = notices.Next(testContext(t))
		check("lifecycle", err)
		check("session", context.Cause(s.Context()))
		check("later call", c.Call(testContext(t), "work", nil, nil))
		_, err = s.SendAndWait(testContext(t), Message{Prompt: "hi"})
		check("later turn", err)
		if err := c.Stop(testContext(t)); err != nil {
			t.Errorf("stop: %v", err)
		}
		check("Err after Stop", c.Err())
	}
}

func TestCase015OrderlyStop(t *testing.T) {
	t.Run("finishes", func(t *testing.T) {
		spineFlat(t)
		log := filepath.Join(t.TempDir(), "log")
		c := spineStart(t, spineOptions(t, spineScript{On: map[string]string{"runtime.shutdown": "finish"}, Log: log}))
		if err := c.Stop(testContext(t)); err != nil {
			t.Error(err)
		}
		if got, want := spineLog(t, log), []string{"connect", "runtime.shutdown", "finished"}; !slices.Equal(got, want) {
			t.Errorf("the child saw %v, want %v", got, want)
		}
		if state, err := c.ForceStopAndWait(testContext(t)); err != nil || !state.Success() {
			t.Errorf("ended with %v, %v", state, err)
		}
	})
	if runtime.GOOS == "windows" {
		return // no signals
	}
	t.Run("escalates", func(t *testing.T) {
		spineFlat(t)
		log := filepath.Join(t.TempDir(), "log")
		o := spineOptions(t, spineScript{On: map[string]string{"runtime.shutdown": "silent"}, Log: log, IgnoreEOF: true, IgnoreTERM: true})
		o.StopGrace = 300 * time.Millisecond
		c := spineStart(t, o)
		if err := c.Stop(testContext(t)); err != nil {
			t.Error(err)
		}
		if got, want := spineLog(t, log), []string{"connect", "runtime.shutdown", "EOF", "TERM"}; !slices.Equal(got, want) {
			t.Errorf("the child saw %v, want %v", got, want)
		}
	})
}

func TestCase016StopConfirmsTheEnd(t *testing.T) {
	for _, script := range []spineScript{
		{On: map[string]string{"runtime.shutdown": "close"}, IgnoreEOF: true, IgnoreTERM: true},
		{TCP: true, On: map[string]string{"runtime.shutdown": "result null"}, IgnoreEOF: true, IgnoreTERM: true},
	} {
		t.Run(fmt.Sprintf("TCP=%v", script.TCP), func(t *testing.T) {
			spineFlat(t)
			o := spineOptions(t, script)
			o.StopGrace = 100 * time.Millisecond
			c := spineStart(t, o)
			if err := c.Stop(testContext(t)); err != nil {
				t.Error(err)
			}
			if kids := spineKids(); len(kids) > 0 {
				t.Errorf("children when Stop returned: %v", kids)
			}
			state, err := c.ForceStopAndWait(testContext(t)) // how it ended is known to whoever asks
			if err != nil || state.Success() {
				t.Errorf("ended with %v, %v", state, err)
			}
			if c.Err() != ErrClosed {
				t.Errorf("Err is %v", c.Err())
			}
		})
	}
}

func TestCase017ClientsLeaveNoZombies(t *testing.T) {
	spineFlat(t)
	for range spineRounds(50) {
		if err := spineStart(t, spineOptions(t, spineScript{})).Stop(testContext(t)); err != nil {
			t.Error(err)
		}
		crashed := spineStart(t, spineOptions(t, spineScript{On: map[string]string{"work": "exit 3"}}))
		crashed.Call(testContext(t), "work", nil, nil)
		await(t, "end of a crashed child", crashed.Done())
		if _, err := Start(testContext(t), spineOptions(t, spineScript{On: map[string]string{"connect": "exit 4"}})); err == nil {
			t.Error("a start without a handshake")
		}
		ctx, cancel := context.WithCancel(context.Background())
		timer := time.AfterFunc(time.Duration(rand.Intn(20))*time.Millisecond, cancel) // anywhere in the start
		if c, err := Start(ctx, spineOptions(t, spineScript{})); err == nil {
			c.ForceStop()
			await(t, "client's end", c.Done())
		}
		timer.Stop()
		cancel()
		if kids := spineKids(); len(kids) > 0 {
			t.Fatalf("children after a round: %v", kids)
		}
	}
}

func TestCase018ChildIgnoresEOF(t *testing.T) {
	spineFlat(t)
	log := filepath.Join(t.TempDir(), "log")
	o := spineOptions(t, spineScript{On: map[string]string{"runtime.shutdown": "silent"}, Log: log, IgnoreEOF: true, IgnoreTERM: true})
	c := spineStart(t, o)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := c.Stop(ctx); err != nil { // straight to the kill, and that is confirmed
		t.Error(err)
	}
	if kids := spineKids(); len(kids) > 0 {
		t.Errorf("children when Stop returned: %v", kids)
	}
}

func TestCase019StopReleasesAtOnce(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	p.handle("session.destroy", func(*peer, peerMessage) any { return noAnswer })
	ids := make(map[string]bool)
	for range 50 {
		ids[createSession(t, c, nil).ID()] = true
	}
	ctx, cancel := context.WithCancel(context.Background())
	stopped := async(func() error { return c.Stop(ctx) })
	p.wait("session.destroy", 50) // all of them, before any was answered
	cancel()
	err := await(t, "stop", stopped)
	if !errors.Is(err, ErrNotConfirmed) {
		t.Fatalf("got %v", err)
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		t.Fatalf("got %T", err)
	}
	for _, err := range joined.Unwrap() {
		var s *SessionError
		if !errors.As(err, &s) || !ids[s.SessionID] || strings.Contains(err.Error(), s.SessionID) || strings.Count(err.Error(), "copilot: ") != 1 {
			t.Errorf("got %v", err)
			continue
		}
		delete(ids, s.SessionID)
	}
	if len(ids) > 0 {
		t.Errorf("%d sessions are not in the error", len(ids))
	}
}

// spineDial returns a client that is connected over loopback TCP, and the other end.
func spineDial(t testing.TB, o *Options) (*Client, *peer, *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	type accepted struct {
		conn net.Conn
		err  error
	}
	far := make(chan accepted, 1)
	var p *peer
	// Ends with the connection, or the listener.
	go func() {
		conn, err := l.Accept()
		far <- accepted{conn, err}
	}()
	dialled := make(chan error, 1)
	var c *Client
	// Ends with the handshake; awaited below.
	go func() {
		var err error
		c, err = Dial(testContext(t), l.Addr().String(), o)
		dialled <- err
	}()
	a := await(t, "connection", far)
	if a.err != nil {
		t.Fatal(a.err)
	}
	p = startPeer(t, a.conn)
	if err := await(t, "dial", dialled); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.ForceStop()
		await(t, "client's end", c.Done())
	})
	return c, p, a.conn.(*net.TCPConn)
}

func TestCase020DeadServer(t *testing.T) {
	const inFlight = 20
	run := func(t *testing.T, c *Client, arrived func(), kill func(), is func(error) bool) {
		t.Helper()
		s := createSession(t, c, nil)
		sub := s.Subscribe()
		var calls []<-chan error
		for range inFlight {
			calls = append(calls, async(func() error { return c.Call(testContext(t), "work", nil, nil) }))
		}
		arrived()
		kill()
		for _, call := range calls {
			if err := await(t, "call", call); !is(err) || errors.Is(err, context.Canceled) {
				t.Errorf("in flight: %v", err)
			}
		}
		if err := c.Call(testContext(t), "work", nil, nil); !is(err) {
			t.Errorf("later: %v", err)
		}
		if _, err := sub.Next(testContext(t)); !is(err) {
			t.Errorf("sequence: %v", err)
		}
		await(t, "client's end", c.Done())
		if err := c.Err(); !is(err) {
			t.Errorf("Err: %v", err)
		}
	}
	t.Run("exit", func(t *testing.T) {
		spineFlat(t)
		c := spineStart(t, spineOptions(t, spineScript{On: map[string]string{"work": "silent"}}))
		run(t, c, func() {}, func() {
			if p, err := os.FindProcess(c.PID()); err != nil || p.Kill() != nil {
				t.Error("not killed")
			}
		}, func(err error) bool {
			var e *ExitError
			return errors.As(err, &e) && !e.State.Success()
		})
	})
	for _, how := range []string{"reset", "half-close"} {
		t.Run(how, func(t *testing.T) {
			spineFlat(t)
			c, p, conn := spineDial(t, nil)
			p.handle("work", func(*peer, peerMessage) any { return noAnswer })
			kill, want := func() { conn.CloseWrite() }, error(io.ErrUnexpectedEOF)
			if how == "reset" {
				kill, want = func() { conn.SetLinger(0); conn.Close() }, syscall.ECONNRESET
			}
			run(t, c, func() { p.wait("work", inFlight) }, kill, func(err error) bool { return errors.Is(err, want) })
		})
	}
}

func TestCase021ChildDiesUnasked(t *testing.T) {
	for _, tcp := range []bool{false, true} {
		spineFlat(t)
		c := spineStart(t, spineOptions(t, spineScript{TCP: tcp}))
		s := createSession(t, c, nil)
		seq := s.Events(context.Background())
		child, err := os.FindProcess(c.PID())
		if err != nil {
			t.Fatal(err)
		}
		if err := child.Kill(); err != nil {
			t.Fatal(err)
		}
		await(t, "Done, without any call", c.Done())
		var e *ExitError
		if err := c.Err(); !errors.As(err, &e) {
			t.Errorf("Err: %v", err)
		}
		pairs := 0
		for _, err := range seq {
			if pairs++; !errors.As(err, &e) {
				t.Errorf("sequence: %v", err)
			}
		}
		if pairs != 1 {
			t.Errorf("%d pairs", pairs)
		}
		if _, err := s.Send(testContext(t), Message{Prompt: "hi"}); !errors.As(err, &e) {
			t.Errorf("Send: %v", err)
		}
	}
}

type spineWriter func([]byte) (int, error)

func (w spineWriter) Write(b []byte) (int, error) { return w(b) }

func TestCase022StderrIsDrained(t *testing.T) {
	block := make(chan struct{})
	defer close(block)
	for name, sink := range map[string]io.Writer{
		"none":   nil,
		"blocks": spineWriter(func(b []byte) (int, error) { <-block; return len(b), nil }),
		"panics": spineWriter(func(b []byte) (int, error) { panic("sink") }),
		"fails":  spineWriter(func(b []byte) (int, error) { return 0, io.ErrClosedPipe }),
	} {
		t.Run(name, func(t *testing.T) {
			o := spineOptions(t, spineScript{Flood: 8 << 20, On: map[string]string{"die": "exit 7"}})
			o.Stderr = sink
			c := spineStart(t, o)
			if err := c.Call(testContext(t), "work", nil, nil); err != nil {
				t.Error(err)
			}
			var e *ExitError
			if err := c.Call(testContext(t), "die", nil, nil); !errors.As(err, &e) {
				t.Fatal(err)
			}
			if n := len(e.Stderr); n == 0 || n > 64<<10 {
				t.Errorf("a tail of %d bytes", n)
			}
		})
	}
}

func TestCase023StdoutIsDrainedOverTCP(t *testing.T) {
	spineFlat(t)
	c := spineStart(t, spineOptions(t, spineScript{TCP: true, Logs: 4 << 20}))
	if err := c.Call(testContext(t), "work", nil, nil); err != nil {
		t.Error(err)
	}
	if err := c.Stop(testContext(t)); err != nil {
		t.Error(err)
	}
}

func TestCase027NoSilentRestart(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	if c.Err() != nil || isClosed(c.Done()) {
		t.Error("ended before its end")
	}
	p.conn.Close()
	await(t, "client's end", c.Done())
	first := c.Err()
	if !errors.Is(first, io.ErrUnexpectedEOF) {
		t.Errorf("got %v", first)
	}
	for range 3 {
		if err := c.Call(testContext(t), "work", nil, nil); err != first {
			t.Errorf("later call: %v", err)
		}
		if _, err := c.CreateSession(testContext(t), nil); !errors.Is(err, first) {
			t.Errorf("later session: %v", err)
		}
	}
	if err := c.Stop(testContext(t)); err != nil {
		t.Error(err)
	}
	if c.Err() != first {
		t.Errorf("Stop has changed Err to %v", c.Err())
	}
	if state, err := c.ForceStopAndWait(testContext(t)); state != nil || err != nil {
		t.Errorf("childless: %v, %v", state, err)
	}
}

func TestCase028LateAnswer(t *testing.T) {
	t.Run("after idle", func(t *testing.T) {
		leakCheck(t)
		release := make(chan struct{})
		c, p := newPeer(t, &Options{Handlers: map[string]HandlerFunc{"custom.work": func(ctx context.Context, method string, params json.RawMessage) (any, error) {
			<-release
			return map[string]bool{"done": true}, ctx.Err()
		}}})
		s := createSession(t, c, nil)
		turn := async(func() error { _, err := s.SendAndWait(testContext(t), Message{Prompt: "hi"}); return err })
		p.wait("session.send", 1)
		answer := p.ask("custom.work", map[string]string{"sessionId": s.ID()})
		p.send(p.event(s.ID(), "user.message", map[string]any{"messageId": "m1"}), p.event(s.ID(), "session.idle", nil))
		if err := await(t, "turn", turn); err != nil {
			t.Fatal(err)
		}
		close(release)
		if m := await(t, "late answer", answer); string(m.Result) != `{"done":true}` {
			t.Errorf("got %s, %v", m.Result, m.Error)
		}
	})
	t.Run("after Stop", func(t *testing.T) {
		leakCheck(t)
		spineSilent(t)
		began, returned := make(chan struct{}), make(chan struct{})
		c, p := newPeer(t, &Options{Handlers: map[string]HandlerFunc{"custom.work": func(ctx context.Context, method string, params json.RawMessage) (any, error) {
			close(began)
			<-ctx.Done()
			if context.Cause(ctx) != ErrClosed {
				t.Errorf("cause: %v", context.Cause(ctx))
			}
			<-returned
			return "late", nil
		}}})
		p.ask("custom.work", nil)
		await(t, "handler", began)
		if err := c.Stop(testContext(t)); err != nil { // does not wait for the handler
			t.Error(err)
		}
		close(returned)
	})
}

// spineSilent fails the test when something is written to the program's own stdout or stderr until its end.
func spineSilent(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, stderr := os.Stdout, os.Stderr
	os.Stdout, os.Stderr = w, w
	t.Cleanup(func() {
		os.Stdout, os.Stderr = stdout, stderr
		w.Close()
		if b, _ := io.ReadAll(r); len(b) > 0 {
			t.Errorf("printed: %q", b)
		}
		r.Close()
	})
}

// ---- frames ----

// spineChunks hands bytes out in pieces of random size, and says EOF at the end.
type spineChunks struct {
	rest []byte
	max  int
	rand *rand.Rand
}

func (c *spineChunks) Read(b []byte) (int, error) {
	if len(c.rest) == 0 {
		return 0, io.EOF
	}
	n := min(1+c.rand.Intn(c.max), len(c.rest), len(b))
	copy(b, c.rest[:n])
	c.rest = c.rest[n:]
	return n, nil
}

func spineFrame(body string) string {
	return fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(body), body)
}

func TestFrameReaders(t *testing.T) {
	bodies := []string{`{}`, ``, `{"a":"😀 é 漢字"}`, strings.Repeat("x", 70_000)}
	var stream string
	for _, b := range bodies {
		stream += spineFrame(b)
	}
	for name, wrap := range map[string]func(io.Reader) io.Reader{
		"plain":    func(r io.Reader) io.Reader { return r },
		"one byte": iotest.OneByteReader,
		"half":     iotest.HalfReader,
		"data+err": iotest.DataErrReader,
		"chunks":   func(io.Reader) io.Reader { return &spineChunks{[]byte(stream), 4096, rand.New(rand.NewSource(1))} },
	} {
		t.Run(name, func(t *testing.T) {
			r := newFrameReader(wrap(strings.NewReader(stream)), defaultMaxFrame)
			for i, want := range bodies {
				if got, err := r.next(); err != nil || string(got) != want {
					t.Fatalf("frame %d: %.40q, %v", i, got, err)
				}
			}
			if _, err := r.next(); err != io.EOF {
				t.Errorf("at the end: %v", err)
			}
		})
	}
	t.Run("broken", func(t *testing.T) {
		broken := errors.New("broken")
		for _, n := range []int{0, 5, 18, 20, 21, 22} { // between frames, in a header, in a body
			r := newFrameReader(io.MultiReader(strings.NewReader(stream[:n]), iotest.ErrReader(broken)), defaultMaxFrame)
			for {
				if _, err := r.next(); err != nil {
					if err != broken {
						t.Errorf("after %d bytes: %v", n, err)
					}
					break
				}
			}
			r = newFrameReader(iotest.TimeoutReader(iotest.OneByteReader(strings.NewReader(stream))), defaultMaxFrame)
			if _, err := r.next(); err != iotest.ErrTimeout {
				t.Errorf("timeout: %v", err)
			}
		}
	})
	t.Run("cut", func(t *testing.T) {
		one := spineFrame(`{"a":1}`)
		for n := 1; n < len(one); n++ {
			if _, err := newFrameReader(strings.NewReader(one[:n]), defaultMaxFrame).next(); err != io.ErrUnexpectedEOF {
				t.Errorf("after %d bytes: %v", n, err)
			}
		}
	})
}

func TestCase029LargeMessages(t *testing.T) {
	leakCheck(t)
	near, far := net.Pipe()
	p := startPeer(t, far)
	c, err := NewClient(testContext(t), near, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.ForceStop()
	s := createSession(t, c, nil)
	sub := s.Subscribe()
	random := rand.New(rand.NewSource(29))
	chunked := func(body string) {
		p.writing.Lock()
		defer p.writing.Unlock()
		chunk := max(4096, len(body)/256)
		io.CopyBuffer(struct{ io.Writer }{p.conn}, &spineChunks{[]byte(spineFrame(body)), chunk, random}, make([]byte, chunk))
	}
	for _, size := range []int{65_535, 65_536, 65_537, 1 << 20, 16 << 20} {
		body := fmt.Sprintf(`{"method":"session.event","params":{"sessionId":%q,"event":{"type":"x","data":["","!"]}}}`, s.ID())
		text := `["` + strings.Repeat("é", (size-len(body))/2) + `","!"]`
		chunked(strings.Replace(body, `["","!"]`, text, 1))
		if e := next(t, sub); string(e.Data) != text {
			t.Errorf("event of %d: %d bytes", size, len(e.Data))
		}
		p.handle("echo", func(p *peer, m peerMessage) any {
			if size <= 1<<20 && string(m.Params) != text {
				t.Errorf("request of %d: %d bytes", size, len(m.Params))
			}
			chunked(fmt.Sprintf(`{"id":%s,"result":%s}`, m.ID, text))
			return noAnswer
		})
		params := json.RawMessage(text)
		if size > 1<<20 {
			params = nil // the race detector makes copies of that size slow
		}
		ctx, cancel := context.WithTimeout(context.Background(), 6*patience)
		var got json.RawMessage
		if err := c.Call(ctx, "echo", params, &got); err != nil || string(got) != text {
			t.Errorf("response of %d: %d bytes, %v", size, len(got), err)
		}
		cancel()
	}
}

func TestCase030FrameLimit(t *testing.T) {
	leakCheck(t)
	const limit = 1 << 20
	c, p := newPeer(t, &Options{MaxFrameBytes: limit})
	s := createSession(t, c, &SessionConfig{EventBuffer: 4096})
	sub := s.Subscribe()
	for range 3000 {
		p.emit(s.ID(), "x", strings.Repeat("x", 900))
	}
	p.sync()
	sized := func(n int) string { // an event whose body has n bytes
		frame := string(encodeFrame(p.event(s.ID(), "x", "")))
		body := frame[strings.Index(frame, "{"):]
		return strings.Replace(body, `"data":""`, `"data":"`+strings.Repeat("x", n-len(body))+`"`, 1)
	}
	for _, n := range []int{limit - 1, limit} {
		p.raw([]byte(spineFrame(sized(n))))
	}
	p.sync()
	pending := async(func() error { return c.Call(testContext(t), "work", nil, nil) })
	p.handle("work", func(*peer, peerMessage) any { return noAnswer })
	p.wait("work", 1)
	p.raw([]byte(fmt.Sprintf("Content-Length: %d\r\n\r\n", limit+1)))
	await(t, "client's end", c.Done())
	for what, err := range map[string]error{"pending": await(t, "call", pending), "Err": c.Err(), "later": c.Call(testContext(t), "work", nil, nil)} {
		var f *FrameError
		if !errors.Is(err, ErrFrameTooLarge) || !errors.As(err, &f) || f.Size != limit+1 || !strings.Contains(err.Error(), strconv.Itoa(limit)) {
			t.Errorf("%s: %v", what, err)
		}
	}
	n := 0
	for {
		_, err := sub.Next(testContext(t))
		if err != nil {
			if !errors.Is(err, ErrFrameTooLarge) {
				t.Errorf("sequence: %v", err)
			}
			break
		}
		n++
	}
	if n != 3002 {
		t.Errorf("%d events", n)
	}
}

// spineAllocated is how many bytes f allocates.
func spineAllocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

func TestCase031DeclaredLength(t *testing.T) {
	for _, tt := range []struct {
		name, input string
		want        error // nil is a *FrameError without a sentinel
	}{
		{"huge", "Content-Length: 9223372036854775807\r\n\r\n", ErrFrameTooLarge},
		{"negative", "Content-Length: -1\r\n\r\n", nil},
		{"plus", "Content-Length: +5\r\n\r\n{}   ", nil},
		{"exponent", "Content-Length: 1e3\r\n\r\n", nil},
		{"hexadecimal", "Content-Length: 0x10\r\n\r\n", nil},
		{"empty", "Content-Length:\r\n\r\n", nil},
		{"two numbers", "Content-Length: 2 2\r\n\r\n{}", nil},
		{"20 digits", "Content-Length: 18446744073709551618\r\n\r\n{}", nil},
		{"twice", "Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ", nil},
		{"none", "Content-Type: x\r\n\r\n", nil},
		{"blank", "\r\n\r\n", nil},
		{"endless header", "X: " + strings.Repeat("y", 1<<20), nil},
		{"endless headers", strings.Repeat("X: y\r\n", 1<<17), nil},
		{"at the limit, nothing follows", fmt.Sprintf("Content-Length: %d\r\n\r\n{", defaultMaxFrame), io.ErrUnexpectedEOF},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var err error
			allocated := spineAllocated(func() {
				_, err = newFrameReader(strings.NewReader(tt.input), defaultMaxFrame).next()
			})
			var f *FrameError
			switch {
			case tt.want == io.ErrUnexpectedEOF && err != tt.want,
				tt.want != io.ErrUnexpectedEOF && !errors.As(err, &f),
				tt.want == ErrFrameTooLarge && (!errors.Is(err, tt.want) || f.Size != 1<<63-1),
				f != nil && len(f.Quote) > 256:
				t.Errorf("got %v", err)
			}
			if allocated > 2<<20 {
				t.Errorf("%d bytes allocated", allocated)
			}
		})
	}
}

func TestCase032HeaderSpelling(t *testing.T) {
	for header, ok := range map[string]bool{
		"Content-Length: 2\r\n\r\n":                                   true,
		"content-length:2\r\n\r\n":                                    true,
		"CONTENT-LENGTH :  2  \r\n\r\n":                               true,
		"Content-Type: a; charset=utf-8\r\nContent-Length: 2\r\n\r\n": true,
		"Content-Length: 2\r\nContent-Type: a\r\n\r\n":                true,
		"X-Unknown:\r\nContent-Length:\t2\r\n\r\n":                    true,
		"Content-Length: 2\n\n":                                       true,
		"Content-Length 2\r\n\r\n":                                    false,
		"Content-Length: two\r\n\r\n":                                 false,
		"Content_Length: 2\r\n\r\n":                                   false,
	} {
		got, err := newFrameReader(strings.NewReader(header+"{}"), defaultMaxFrame).next()
		var f *FrameError
		if ok && (err != nil || string(got) != "{}") || !ok && !errors.As(err, &f) {
			t.Errorf("%q: %q, %v", header, got, err)
		}
	}
}

func TestCase033LengthCountsBytes(t *testing.T) {
	leakCheck(t)
	near, far := net.Pipe()
	const prompt = "aé漢😀"
	served := async(func() error {
		defer far.Close()
		r := bufio.NewReader(far)
		for range 3 {
			body, err := spineReadFrame(r)
			if err != nil {
				return err
			}
			var m peerMessage
			if err := json.Unmarshal(body, &m); err != nil {
				return err
			}
			if m.Method == "work" && m.get("prompt") != prompt {
				return fmt.Errorf("prompt %q", m.get("prompt"))
			}
			fmt.Fprint(far, spineFrame(fmt.Sprintf(`{"id":%s,"result":{"protocolVersion":3}}`, m.ID)))
		}
		body := `{"method":"x","params":"😀"}`
		fmt.Fprintf(far, "Content-Length: %d\r\n\r\n%s", len(body)-1, body)
		return nil
	})
	c, err := NewClient(testContext(t), near, nil)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := c.Call(testContext(t), "work", map[string]string{"prompt": prompt}, nil); err != nil {
			t.Error(err)
		}
	}
	if err := await(t, "server", served); err != nil {
		t.Error(err)
	}
	await(t, "client's end", c.Done())
	var f *FrameError
	if err := c.Err(); !errors.As(err, &f) {
		t.Errorf("one byte short: %v", err)
	}
}

func TestCase034CutCharacters(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	sub := s.Subscribe()
	const text = "😀 e\u0301 漢字 \u2028 👩‍👩‍👧"
	for _, b := range encodeFrame(p.event(s.ID(), "assistant.message", map[string]any{"messageId": "a", "content": text})) {
		p.raw([]byte{b})
	}
	if m, ok := next(t, sub).Payload().(*AssistantMessage); !ok || m.Content != text {
		t.Errorf("got %+v", m)
	}
}

func TestCase035TextAmongFrames(t *testing.T) {
	good := string(encodeFrame(notification("x", nil)))
	for _, tt := range []struct{ name, input, quote string }{
		{"banner", "Update available!\n", "Update available!\n"},
		{"between frames", good + "Update available!\n", "Update available!\n"},
		{"no line end", strings.Repeat("z", 10<<20), strings.Repeat("z", 256)},
		{"zeros", "\x00\x00\x00\x00", "\x00"},
		{"escape codes", "\x1b[1mUpdate\n", "\x1b[1mUpdate\n"},
		{"broken JSON", spineFrame(`{"method":"x"`), `{"method":"x"`},
		{"two values", spineFrame(`{}{}`), `{}{}`},
		{"empty body", spineFrame(``), ""},
		{"long broken JSON", spineFrame(strings.Repeat("[", 300)), strings.Repeat("[", 256)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			leakCheck(t)
			c, p := newPeer(t, nil)
			p.handle("work", func(p *peer, m peerMessage) any { p.raw([]byte(tt.input)); return noAnswer })
			err := c.Call(testContext(t), "work", nil, nil)
			var f *FrameError
			if !errors.As(err, &f) || len(f.Quote) > 256 || !strings.HasPrefix(f.Quote, tt.quote) || strings.ContainsFunc(err.Error(), func(r rune) bool { return r < ' ' }) {
				t.Errorf("got %v", err)
			}
			await(t, "client's end", c.Done())
			if c.Err() != err {
				t.Errorf("Err: %v", c.Err())
			}
		})
	}
}

// spineDrip lets one byte through per write.
type spineDrip struct{ net.Conn }

func (d spineDrip) Write(b []byte) (int, error) { return d.Conn.Write(b[:1]) }

func TestCase036WholeFrames(t *testing.T) {
	for _, tt := range []struct {
		name                string
		senders, sends, max int
		wrap                func(net.Conn) io.ReadWriteCloser
	}{
		{"many", 64, 10, 100_000, func(c net.Conn) io.ReadWriteCloser { return c }},
		{"one byte per write", 8, 4, 300, func(c net.Conn) io.ReadWriteCloser { return spineDrip{c} }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			leakCheck(t)
			near, far := net.Pipe()
			var requests, answers, asked atomic.Int64
			served := async(func() error {
				defer far.Close()
				r := bufio.NewReader(far)
				for {
					body, err := spineReadFrame(r)
					if err == io.EOF {
						return nil
					}
					if err != nil {
						return err
					}
					var m peerMessage
					if err := json.Unmarshal(body, &m); err != nil {
						return err
					}
					if m.Method == "" {
						answers.Add(1)
						continue
					}
					requests.Add(1)
					out := spineFrame(fmt.Sprintf(`{"id":%s,"result":{"protocolVersion":3,"size":%d}}`, m.ID, len(m.Params)-len(`{"text":""}`)))
					if m.Method == "work" {
						asked.Add(2) // one for a handler, one for the reader itself
						out += spineFrame(`{"id":1,"method":"custom.work"}`) + spineFrame(`{"id":"r","method":"unknown"}`)
					}
					if _, err := io.WriteString(far, out); err != nil {
						return err
					}
				}
			})
			c, err := NewClient(testContext(t), tt.wrap(near), &Options{Handlers: map[string]HandlerFunc{"custom.work": func(context.Context, string, json.RawMessage) (any, error) {
				return strings.Repeat("r", 1000), nil
			}}})
			if err != nil {
				t.Fatal(err)
			}
			var senders sync.WaitGroup
			for i := range tt.senders {
				senders.Add(1)
				random := rand.New(rand.NewSource(int64(i)))
				// Ends after its sends; the test waits.
				go func() {
					defer senders.Done()
					for range tt.sends {
						size := 1 + random.Intn(1+random.Intn(1+random.Intn(tt.max)))
						var got struct{ Size int }
						if err := c.Call(testContext(t), "work", map[string]string{"text": strings.Repeat("t", size)}, &got); err != nil || got.Size != size {
							t.Errorf("sent %d, server saw %d, %v", size, got.Size, err)
						}
					}
				}()
			}
			senders.Wait()
			for answers.Load() < asked.Load() { // the last answers may still be on their way
				if err := c.Call(testContext(t), "again", nil, nil); err != nil {
					t.Fatal(err)
				}
			}
			c.ForceStop()
			await(t, "client's end", c.Done())
			if err := await(t, "server", served); err != nil {
				t.Error(err)
			}
			if got, want := requests.Load(), int64(1+tt.senders*tt.sends); got < want {
				t.Errorf("%d requests, want %d", got, want)
			}
		})
	}
}

func TestCase037NothingIsEscapedForHTML(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	const prompt = "<a href=\"x\">&</a>\u2028\u2029"
	if _, err := s.Send(testContext(t), Message{Prompt: prompt}); err != nil {
		t.Fatal(err)
	}
	m := p.wait("session.send", 1)
	if !bytes.Contains(m.Params, []byte(`<a href=\"x\">&</a>`)) || m.get("prompt") != prompt {
		t.Errorf("the server got %s", m.Params)
	}
	sub := s.Subscribe()
	raw := `{"prompt":"<&>\u003c` + "\u2028" + `"}`
	p.raw([]byte(spineFrame(fmt.Sprintf(`{"method":"session.event","params":{"sessionId":%q,"event":{"type":"x","data":%s}}}`, s.ID(), raw))))
	if got := next(t, sub); string(got.Data) != raw {
		t.Errorf("data became %s", got.Data)
	}
}

func TestCase038ExactNames(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	sub := s.Subscribe()
	p.handle("work", func(p *peer, m peerMessage) any {
		id := string(m.ID)
		for _, body := range []string{
			`{"jsonrpc":"2.0","id":` + id + `,"Result":{"n":1}}`,
			`{"jsonrpc":"2.0","ID":` + id + `,"result":{"n":2}}`,
			`{"jsonrpc":"2.0","id":` + id + `,"RESULT":{"n":3},"Error":{"code":1}}`,
			`{"METHOD":"x","method":"session.event","Params":{},"params":{"sessionID":"other","sessionId":"` + s.ID() + `","Event":{},"event":{"Type":"a","type":"right","TYPE":"b","data":1,"Data":2}}}`,
			`{"method":"x","METHOD":"session.event","params":{"sessionId":"` + s.ID() + `","event":{"type":"wrong"}}}`,
			`{"method":"session.event","params":{"sessionID":"` + s.ID() + `","event":{"type":"wrong"}}}`,
			`{"jsonrpc":"2.0","id":` + id + `,"result":{"n":4}}`,
		} {
			p.raw([]byte(spineFrame(body)))
		}
		return noAnswer
	})
	var got struct{ N int }
	if err := c.Call(testContext(t), "work", nil, &got); err != nil || got.N != 4 {
		t.Errorf("got %d, %v", got.N, err)
	}
	if e := next(t, sub); e.Type != "right" || string(e.Data) != "1" {
		t.Errorf("got %+v", e)
	}
	if _, ready, _ := sub.poll(); ready {
		t.Error("a second event")
	}
}

// spineTorn fails each write half-way once told to.
type spineTorn struct {
	net.Conn
	torn   atomic.Bool
	writes atomic.Int64 // since then
}

var errTorn = errors.New("torn")

func (c *spineTorn) Write(b []byte) (int, error) {
	if !c.torn.Load() {
		return c.Conn.Write(b)
	}
	c.writes.Add(1)
	n, _ := c.Conn.Write(b[:len(b)/2])
	return n, errTorn
}

func TestCase039TornFrame(t *testing.T) {
	leakCheck(t)
	near, far := net.Pipe()
	p := startPeer(t, far)
	conn := &spineTorn{Conn: near}
	c, err := NewClient(testContext(t), conn, &Options{Handlers: map[string]HandlerFunc{"custom.work": func(context.Context, string, json.RawMessage) (any, error) {
		conn.torn.Store(true)
		return "answer", nil
	}}})
	if err != nil {
		t.Fatal(err)
	}
	p.ask("custom.work", nil) // nobody waits for the write of its answer
	await(t, "client's end", c.Done())
	if !errors.Is(c.Err(), errTorn) {
		t.Errorf("Err: %v", c.Err())
	}
	if err := c.Call(testContext(t), "work", nil, nil); !errors.Is(err, errTorn) {
		t.Errorf("later: %v", err)
	}
	if n := conn.writes.Load(); n != 1 {
		t.Errorf("%d writes behind the torn one", n-1)
	}
}

func TestCase040IDs(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	for _, id := range []string{`7`, `"7"`, `9007199254740993`, `-1`, `1.5`, `""`, `"é"`, `"\u00e9"`, `123456789012345678901234567890`, `null`} {
		answer := make(chan peerMessage, 1)
		p.mu.Lock()
		p.answers[id] = answer
		p.mu.Unlock()
		p.raw([]byte(spineFrame(`{"jsonrpc":"2.0","id":` + id + `,"method":"future.method"}`)))
		if id == `null` {
			continue // answered too, but an id of null cannot be told from none here
		}
		if m := await(t, "answer to "+id, answer); string(m.ID) != id || m.Error == nil {
			t.Errorf("asked as %s, answered as %s", id, m.ID)
		}
	}
	p.handle("work", func(p *peer, m peerMessage) any {
		for _, id := range []string{`null`, `0`, `999999`, `-1`, `"` + string(m.ID) + `"`, string(m.ID) + `.0`, `18446744073709551616`, `{}`, `[]`, `true`} {
			p.raw([]byte(spineFrame(`{"jsonrpc":"2.0","id":` + id + `,"result":"wrong"}`)))
		}
		return "right"
	})
	var got string
	if err := c.Call(testContext(t), "work", nil, &got); err != nil || got != "right" {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestCase041TwoIDSpaces(t *testing.T) {
	leakCheck(t)
	asked := make(chan string, 1)
	c, p := newPeer(t, &Options{Handlers: map[string]HandlerFunc{"custom.ask": func(ctx context.Context, method string, params json.RawMessage) (any, error) {
		asked <- string(params)
		return "answer", nil
	}}})
	p.handle("work", func(*peer, peerMessage) any { return noAnswer })
	call := async(func() error {
		var got string
		err := c.Call(testContext(t), "work", nil, &got)
		if err == nil && got != "true response" {
			err = fmt.Errorf("got %q", got)
		}
		return err
	})
	id := p.wait("work", 1).ID
	answer := make(chan peerMessage, 1)
	p.mu.Lock()
	p.answers[string(id)] = answer
	p.mu.Unlock()
	p.send(map[string]any{"jsonrpc": "2.0", "id": id, "method": "custom.ask", "params": []int{1}, "result": "no response"})
	if params := await(t, "handler", asked); params != "[1]" {
		t.Errorf("params %s", params)
	}
	if m := await(t, "answer", answer); string(m.Result) != `"answer"` {
		t.Errorf("answered %s", m.Result)
	}
	for _, method := range []string{`""`, `null`, `5`, `{}`} {
		p.mu.Lock()
		p.answers[string(id)] = answer
		p.mu.Unlock()
		p.raw([]byte(spineFrame(fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"method":%s,"result":1}`, id, method))))
		if m := await(t, "answer", answer); m.Error == nil || m.Error.Code != codeInvalidRequest {
			t.Errorf("method %s: %+v", method, m)
		}
	}
	p.answer(id, "true response")
	if err := await(t, "call", call); err != nil {
		t.Error(err)
	}
}

func TestCase042EveryRequestIsAnswered(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, &Options{Handlers: map[string]HandlerFunc{
		"custom.refuse": func(context.Context, string, json.RawMessage) (any, error) {
			return nil, &RPCError{Code: 7, Message: "no", Data: json.RawMessage(`{"a":1}`)}
		},
		"custom.fail":    func(context.Context, string, json.RawMessage) (any, error) { return nil, io.ErrNoProgress },
		"custom.panic":   func(context.Context, string, json.RawMessage) (any, error) { panic("secret words") },
		"custom.goexit":  func(context.Context, string, json.RawMessage) (any, error) { runtime.Goexit(); return nil, nil },
		"custom.channel": func(context.Context, string, json.RawMessage) (any, error) { return make(chan int), nil },
		"custom.data": func(context.Context, string, json.RawMessage) (any, error) {
			return nil, &RPCError{Code: 8, Message: "no", Data: json.RawMessage(`{broken`)}
		},
		"custom.nil": func(context.Context, string, json.RawMessage) (any, error) { return nil, nil },
	}})
	for method, code := range map[string]int{
		"future.method": codeMethodNotFound, "custom.refuse": 7, "custom.fail": codeInternal, "custom.panic": codeInternal,
		"custom.goexit": codeInternal, "custom.channel": codeInternal, "custom.data": 8,
	} {
		m := p.request(method, nil)
		if m.Error == nil || m.Error.Code != code || strings.Contains(m.Error.Message, "secret") {
			t.Errorf("%s: %s, %+v", method, m.Result, m.Error)
		}
	}
	if m := p.request("custom.refuse", nil); string(m.Error.Data) != `{"a":1}` {
		t.Errorf("data %s", m.Error.Data)
	}
	if m := p.request("custom.nil", nil); string(m.Result) != "null" || m.Error != nil {
		t.Errorf("nil: %s, %+v", m.Result, m.Error)
	}
	p.mu.Lock()
	before := len(p.seen)
	p.mu.Unlock()
	p.send(notification("future.notice", nil), notification("$/progress", 1), notification("session.event", nil), notification("session.lifecycle", nil))
	p.sync()
	p.mu.Lock()
	defer p.mu.Unlock()
	if got := len(p.seen) - before; got != 1 { // the answer to sync
		t.Errorf("%d messages after notifications", got)
	}
	_ = c
}

// TestReaderOverflow is about a peer that asks and does not read the answers: the reader must neither wait for it nor store them all.
func TestReaderOverflow(t *testing.T) {
	for name, id := range map[string]string{"many": `1`, "large": `"` + strings.Repeat("x", maxReplyBytes/8) + `"`} {
		t.Run(name, func(t *testing.T) {
			leakCheck(t)
			c, p := newPeer(t, nil)
			block := make(chan struct{})
			p.handle("work", func(*peer, peerMessage) any { <-block; return noAnswer }) // reads nothing meanwhile
			call := async(func() error { return c.Call(testContext(t), "work", nil, nil) })
			p.wait("work", 1)
			request := []byte(spineFrame(`{"jsonrpc":"2.0","id":` + id + `,"method":"future.method"}`))
			most := min(10*maxReplies, 10*maxReplyBytes/len(request))
			for i := 0; !isClosed(c.Done()) && i < most; i++ {
				p.raw(request)
			}
			await(t, "client's end", c.Done())
			close(block)
			if err := await(t, "call", call); err == nil || err != c.Err() {
				t.Errorf("got %v, Err is %v", err, c.Err())
			}
		})
	}
}

func TestCase043EndsFromEverywhere(t *testing.T) {
	leakCheck(t)
	for range spineRounds(1000) * 4 {
		near, far := net.Pipe()
		flood := make(chan struct{})
		// Ends when the client, or the round, closes the pipe.
		go func() {
			defer close(flood)
			r := bufio.NewReader(far)
			body, err := spineReadFrame(r)
			if err != nil {
				return
			}
			var m peerMessage
			json.Unmarshal(body, &m)
			io.WriteString(far, spineFrame(fmt.Sprintf(`{"id":%s,"result":{"protocolVersion":3}}`, m.ID)))
			for err == nil {
				_, err = io.WriteString(far, spineFrame(`{"method":"session.lifecycle","params":{"type":"session.updated","sessionId":"x"}}`))
			}
		}()
		c, err := NewClient(testContext(t), near, nil)
		if err != nil {
			t.Fatal(err)
		}
		notices := c.Lifecycle(context.Background())
		start := make(chan struct{})
		var ends []<-chan error
		for _, f := range []func() error{
			func() error { return c.Stop(testContext(t)) },
			func() error { return c.Stop(testContext(t)) },
			func() error { _, err := c.ForceStopAndWait(testContext(t)); return err },
			far.Close,
			func() error {
				for range notices {
				}
				return nil
			},
		} {
			ends = append(ends, async(func() error { <-start; return f() }))
		}
		close(start)
		first, second := await(t, "stop", ends[0]), await(t, "stop", ends[1])
		if first != nil || second != nil {
			t.Errorf("got %v and %v", first, second)
		}
		for _, end := range ends[2:] {
			if err := await(t, "end", end); err != nil {
				t.Error(err)
			}
		}
		await(t, "client's end", c.Done())
		await(t, "flood", flood)
	}
}

// spineStuck is a stream whose read ignores Close.
type spineStuck struct {
	io.ReadWriteCloser
	free chan struct{} // until this is closed
}

func (s *spineStuck) Read(b []byte) (int, error) {
	n, err := s.ReadWriteCloser.Read(b)
	if err != nil {
		<-s.free
	}
	return n, err
}

func TestCase044ReadThatBlocks(t *testing.T) {
	for _, end := range []string{"Stop", "ForceStop"} {
		for _, stuck := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s stuck=%v", end, stuck), func(t *testing.T) {
				leakCheck(t)
				near, far := net.Pipe()
				startPeer(t, far)
				conn := &spineStuck{near, make(chan struct{})}
				if stuck {
					defer close(conn.free)
				} else {
					close(conn.free)
				}
				c, err := NewClient(testContext(t), conn, nil)
				if err != nil {
					t.Fatal(err)
				}
				if end == "ForceStop" {
					c.ForceStop()
					await(t, "client's end", c.Done())
					return
				}
				err = await(t, "stop", async(func() error { return c.Stop(testContext(t)) }))
				if stuck && !errors.Is(err, ErrNotConfirmed) || !stuck && err != nil {
					t.Errorf("got %v", err)
				}
			})
		}
	}
}

func TestCase045CallToADeafPeer(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	block := make(chan struct{})
	p.handle("work", func(*peer, peerMessage) any { <-block; return noAnswer }) // the peer reads nothing meanwhile
	p.handle("late", func(*peer, peerMessage) any { return noAnswer })
	first := async(func() error { return c.Call(testContext(t), "work", nil, nil) })
	p.wait("work", 1)
	for range 3 { // one fills the writer, the others wait for it
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		err := await(t, "call", async(func() error { return c.Call(ctx, "late", nil, nil) }))
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
	}
	close(block)
	p.answer(p.wait("work", 1).ID, "done")
	if err := await(t, "first call", first); err != nil {
		t.Error(err)
	}
	p.sync()
	if n := len(p.calls("late")); n > 1 { // what the writer had taken is written whole; the others never were
		t.Errorf("%d late calls were written", n)
	}
	if n := len(p.calls("$/cancelRequest")); n > 0 {
		t.Errorf("%d notices of cancellation", n)
	}
}

func TestCase048Order(t *testing.T) {
	leakCheck(t)
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(8))
	c, p := newPeer(t, nil)
	const events = 10_000
	var readers []<-chan error
	var ids []string
	for range 3 {
		s := createSession(t, c, &SessionConfig{EventBuffer: events})
		ids = append(ids, s.ID())
		seq := s.Events(testContext(t))
		readers = append(readers, async(func() error {
			last := -1
			for e, err := range seq {
				var n int
				if err == nil {
					err = e.Decode(&n)
				}
				if err != nil || n <= last {
					return fmt.Errorf("%d after %d, %v", n, last, err)
				}
				if last = n; n >= events-3 {
					return nil
				}
			}
			return errors.New("ended early")
		}))
	}
	for i := range events {
		p.emit(ids[i%3], "assistant.message_delta", i)
	}
	for _, r := range readers {
		if err := await(t, "reader", r); err != nil {
			t.Error(err)
		}
	}
}

// ---- the end, seen from everywhere ----

func TestCase046WhoEndedIt(t *testing.T) {
	type ended struct {
		name string
		end  func(cancel context.CancelCauseFunc, c *Client, p *peer, conn *net.TCPConn)
		is   func(error) bool
		ours bool // closed on this side: sequences end without an error
		ctx  bool // only the caller's ctx has ended
	}
	mine := errors.New("mine")
	is := func(targets ...error) func(error) bool {
		return func(err error) bool {
			for _, target := range targets {
				if !errors.Is(err, target) {
					return false
				}
			}
			return true
		}
	}
	framing := func(err error) bool { var f *FrameError; return errors.As(err, &f) }
	exited := func(err error) bool { var e *ExitError; return errors.As(err, &e) && e.State.ExitCode() == 3 }
	for _, tt := range []ended{
		{name: "caller cancels", ctx: true, is: is(context.Canceled, mine),
			end: func(cancel context.CancelCauseFunc, c *Client, p *peer, conn *net.TCPConn) { cancel(mine) }},
		{name: "caller's deadline", ctx: true, is: is(context.DeadlineExceeded)},
		{name: "Stop", ours: true, is: is(ErrClosed),
			end: func(_ context.CancelCauseFunc, c *Client, p *peer, conn *net.TCPConn) { c.Stop(testContext(t)) }},
		{name: "ForceStop", ours: true, is: is(ErrClosed),
			end: func(_ context.CancelCauseFunc, c *Client, p *peer, conn *net.TCPConn) { c.ForceStop() }},
		{name: "EOF", is: is(io.ErrUnexpectedEOF),
			end: func(_ context.CancelCauseFunc, c *Client, p *peer, conn *net.TCPConn) { conn.CloseWrite() }},
		{name: "reset", is: is(syscall.ECONNRESET),
			end: func(_ context.CancelCauseFunc, c *Client, p *peer, conn *net.TCPConn) {
				conn.SetLinger(0)
				conn.Close()
			}},
		{name: "framing", is: framing,
			end: func(_ context.CancelCauseFunc, c *Client, p *peer, conn *net.TCPConn) { p.raw([]byte("oops\n")) }},
		{name: "exit", is: exited},
	} {
		t.Run(tt.name, func(t *testing.T) {
			spineFlat(t)
			var c *Client
			var p *peer
			var conn *net.TCPConn
			end := tt.end
			if tt.name == "exit" {
				c = spineStart(t, spineOptions(t, spineScript{On: map[string]string{"session.send": `result {"messageId":"m1"}`, "work": "silent", "die": "exit 3"}}))
				end = func(_ context.CancelCauseFunc, c *Client, p *peer, conn *net.TCPConn) {
					c.Call(testContext(t), "die", nil, nil)
				}
			} else {
				c, p, conn = spineDial(t, nil)
				p.handle("work", func(*peer, peerMessage) any { return noAnswer })
			}
			s := createSession(t, c, nil)
			ctx, cancel := context.WithCancelCause(testContext(t))
			defer cancel(nil)
			seq := s.Events(ctx)
			ask := createSession(t, c, nil)
			if tt.end == nil && end == nil { // a deadline that has come once everything waits
				timed, stop := context.WithTimeout(ctx, 200*time.Millisecond)
				defer stop()
				ctx, end = timed, func(context.CancelCauseFunc, *Client, *peer, *net.TCPConn) { <-timed.Done() }
				seq = s.Events(ctx)
			}
			call := async(func() error { return c.Call(ctx, "work", nil, nil) })
			own := async(func() error { return s.Call(ctx, "work", nil, nil) })
			wait := async(func() error { _, err := s.SendAndWait(ctx, Message{Prompt: "hi"}); return err })
			last := func(seq iter.Seq2[Event, error]) func() error {
				return func() (last error) {
					for _, err := range seq {
						if last != nil {
							return fmt.Errorf("a pair after the last one: %v", err)
						}
						last = err
					}
					return last
				}
			}
			read, asked := async(last(seq)), async(last(ask.Ask(ctx, Message{Prompt: "hi"})))
			if p != nil {
				p.wait("work", 2)
				spineHandled(p, "session.send", 2)
			}
			end(cancel, c, p, conn)
			for what, result := range map[string]<-chan error{"call": call, "session call": own, "wait": wait, "Ask": asked} {
				if err := await(t, what, result); !tt.is(err) || !tt.ctx && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)) {
					t.Errorf("%s: %v", what, err)
				}
			}
			if err := await(t, "sequence", read); tt.ours && err != nil || !tt.ours && !tt.is(err) {
				t.Errorf("sequence: %v", err)
			}
			if tt.ctx {
				if c.Err() != nil || context.Cause(s.Context()) != nil {
					t.Errorf("the caller's ctx has ended the client: %v, or its session: %v", c.Err(), context.Cause(s.Context()))
				}
				return
			}
			await(t, "client's end", c.Done())
			if err := context.Cause(s.Context()); !tt.is(err) {
				t.Errorf("session: %v", err)
			}
			if !tt.is(c.Err()) || !tt.is(c.Call(testContext(t), "work", nil, nil)) {
				t.Errorf("Err: %v", c.Err())
			}
		})
	}
}

// ---- rings ----

// spineRing is what a ring should do, said without thought for cost.
type spineRing struct {
	mu    sync.Mutex
	all   []int
	max   int
	ended bool
	err   error
}

// spineCursor is a subscriber of a spineRing.
type spineCursor struct {
	pos    int
	closed bool
}

func (r *spineRing) poll(c *spineCursor) (v int, ready bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	oldest := max(0, len(r.all)-r.max)
	switch {
	case c.closed:
		return 0, true, io.EOF
	case c.pos < oldest:
		lag := &LagError{Skipped: uint64(oldest - c.pos)}
		c.pos = oldest
		return 0, true, lag
	case c.pos < len(r.all):
		c.pos++
		return r.all[c.pos-1], true, nil
	case r.ended && r.err != nil:
		return 0, true, r.err
	}
	return 0, r.ended, nil
}

func TestRingAgainstModel(t *testing.T) {
	for seed := range int64(300) {
		random := rand.New(rand.NewSource(seed))
		size := 1 + random.Intn(40)
		got, want := newRing[*int](size), &spineRing{max: size}
		type pair struct {
			sub *Subscription[*int]
			cur *spineCursor
		}
		var pairs []pair
		steps := 1 + random.Intn(600)
		for step := range steps {
			switch k := random.Intn(100); {
			case k < 40 && !want.ended:
				for range 1 + random.Intn(3) {
					v := len(want.all)
					want.all = append(want.all, v)
					if n := got.publish(&v); n != uint64(v) {
						t.Fatalf("seed %d: number %d, want %d", seed, n, v)
					}
				}
			case k < 48 && len(pairs) < 8:
				pairs = append(pairs, pair{got.subscribe(), &spineCursor{pos: len(want.all)}})
			case k < 51 && len(pairs) > 0:
				p := pairs[random.Intn(len(pairs))]
				p.sub.Close()
				p.cur.closed = true
			case k < 54 && len(pairs) > 0:
				p := pairs[random.Intn(len(pairs))]
				if to := random.Intn(len(want.all) + 3); !p.cur.closed && to > p.cur.pos {
					p.sub.seek(uint64(to))
					p.cur.pos = min(to, len(want.all))
				}
			case step == steps-20:
				want.ended = true
				if random.Intn(2) == 0 {
					want.err = io.ErrClosedPipe
				}
				got.end(want.err)
				got.end(io.ErrNoProgress) // the first one counts
				v := -1
				got.publish(&v)
			case len(pairs) > 0:
				p := pairs[random.Intn(len(pairs))]
				for range random.Intn(2 * size) {
					v, ready, err := p.sub.poll()
					wantV, wantReady, wantErr := want.poll(p.cur)
					if wantReady && wantErr == nil && want.ended && v == nil {
						wantErr = io.EOF
					}
					var lag, wantLag *LagError
					if errors.As(err, &lag) != errors.As(wantErr, &wantLag) || lag != nil && *lag != *wantLag ||
						lag == nil && err != wantErr || ready != wantReady || v != nil && *v != wantV {
						t.Fatalf("seed %d, step %d: got %v, %v, %v, want %v, %v, %v", seed, step, v, ready, err, wantV, wantReady, wantErr)
					}
					if !ready || err != nil && lag == nil {
						break
					}
				}
			}
		}
		if len(got.slots) > size {
			t.Fatalf("seed %d: %d slots in a ring of %d", seed, len(got.slots), size)
		}
		// What nobody will read any more is not held.
		unread := len(want.all)
		for _, p := range pairs {
			if !p.cur.closed {
				unread = min(unread, p.cur.pos)
			}
		}
		held := 0
		for _, s := range got.slots {
			if s.value != nil {
				held++
			}
		}
		if most := min(size, len(want.all)-unread); held > most {
			t.Fatalf("seed %d: %d events held, %d are unread", seed, held, most)
		}
	}
}

func TestRingConcurrently(t *testing.T) {
	leakCheck(t)
	const events, size = 20_000, 64
	r := newRing[int](size)
	var readers sync.WaitGroup
	for i := range 6 {
		sub := r.subscribe()
		random := rand.New(rand.NewSource(int64(i)))
		readers.Add(1)
		// Ends with the stream; the test waits.
		go func() {
			defer readers.Done()
			seen, next := 0, 0
			for {
				ctx, cancel := context.WithCancel(context.Background())
				if random.Intn(4) == 0 {
					cancel()
				}
				for v, err := range sub.All(ctx) {
					var lag *LagError
					switch {
					case errors.As(err, &lag):
						next += int(lag.Skipped)
						continue
					case err == context.Canceled:
						continue
					case err == io.ErrClosedPipe:
						if next != events || i == 0 && seen == 0 {
							t.Errorf("reader %d: ended at %d of %d", i, next, events)
						}
						cancel()
						return
					case err != nil || v != next:
						t.Errorf("reader %d: got %d, %v, want %d", i, v, err, next)
						cancel()
						return
					}
					seen++
					next++
					if random.Intn(50) == 0 {
						break
					}
				}
				cancel()
			}
		}()
	}
	readers.Add(1)
	// Comes and goes while the others read; ends after its rounds.
	go func() {
		defer readers.Done()
		for range 300 {
			sub := r.subscribe()
			sub.Next(context.Background())
			sub.Close()
			if _, err := sub.Next(context.Background()); err != io.EOF {
				t.Errorf("after Close: %v", err)
			}
		}
	}()
	for i := range events {
		r.publish(i)
		if i%size == 0 {
			runtime.Gosched()
		}
	}
	r.end(io.ErrClosedPipe)
	readers.Wait()
}

// TestRingForgetsWhoLeft is about subscribers that waited in vain on a quiet stream: the ring must not remember each of them.
func TestRingForgetsWhoLeft(t *testing.T) {
	r := newRing[int](8)
	for range 100 {
		sub := r.subscribe()
		ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
		if _, err := sub.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		cancel()
		sub.Close()
	}
	if n := len(r.waiting); n > 0 {
		t.Errorf("%d closed subscriptions are still waiting", n)
	}
}

func TestCase051CallInsideTheLoop(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, &SessionConfig{EventBuffer: 4})
	const flood = 10_000
	p.handle("session.getMessages", func(p *peer, m peerMessage) any {
		for range flood {
			p.emit(s.ID(), "x", nil)
		}
		return map[string]any{"events": []any{}}
	})
	seq := s.Events(testContext(t))
	p.emit(s.ID(), "first", nil)
	seen, skipped := 0, uint64(0)
	for e, err := range seq {
		var lag *LagError
		switch {
		case errors.As(err, &lag):
			skipped += lag.Skipped
		case err != nil:
			t.Fatal(err)
		case e.Type == "first":
			if _, err := s.History(testContext(t)); err != nil {
				t.Fatal(err)
			}
		default:
			seen++
		}
		if seen+int(skipped) == flood {
			break
		}
	}
	if seen != 4 {
		t.Errorf("%d events in a ring of 4, %d reported as skipped", seen, skipped)
	}
}

func TestCase052SlowConsumer(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	slow, quick := createSession(t, c, nil), createSession(t, c, nil)
	release := make(chan struct{})
	seq, sub := slow.Events(testContext(t)), quick.Subscribe()
	asleep := make(chan struct{})
	sleeper := async(func() error {
		for range seq {
			close(asleep)
			<-release
			return nil
		}
		return errors.New("ended")
	})
	p.emit(slow.ID(), "x", nil)
	await(t, "sleeper", asleep)
	const flood = 100_000
	frame := encodeFrame(p.event(slow.ID(), "x", strings.Repeat("x", 100)))
	for range flood / 1000 {
		p.raw(bytes.Repeat(frame, 1000))
	}
	if err := c.Call(testContext(t), "ping", nil, nil); err != nil {
		t.Error(err)
	}
	for range 10 {
		p.emit(quick.ID(), "y", nil)
	}
	for range 10 {
		if e := next(t, sub); e.Type != "y" {
			t.Errorf("got %s", e.Type)
		}
	}
	slow.ring.mu.Lock()
	if n := len(slow.ring.slots); n > defaultEventBuffer {
		t.Errorf("%d events held", n)
	}
	slow.ring.mu.Unlock()
	close(release)
	if err := await(t, "sleeper", sleeper); err != nil {
		t.Error(err)
	}
}

func TestCase053GapIsReported(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, &SessionConfig{EventBuffer: 16})
	paused, pace := s.Subscribe(), s.Subscribe()
	for i := 1; i <= 100; i++ {
		p.emit(s.ID(), "x", i)
		if i%8 == 0 || i == 100 {
			for n := (i-1)/8*8 + 1; n <= i; n++ {
				if e := next(t, pace); string(e.Data) != strconv.Itoa(n) {
					t.Fatalf("got %s, want %d", e.Data, n)
				}
			}
		}
	}
	p.sync()
	_, err := paused.Next(testContext(t))
	var lag *LagError
	if !errors.As(err, &lag) || lag.Skipped != 84 {
		t.Fatalf("got %v", err)
	}
	for n := 85; n <= 100; n++ {
		if e := next(t, paused); string(e.Data) != strconv.Itoa(n) {
			t.Errorf("got %s, want %d", e.Data, n)
		}
	}
	if _, ready, err := paused.poll(); ready {
		t.Errorf("a second report or event: %v", err)
	}
}

func TestCase054IdleOverwritten(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, &SessionConfig{EventBuffer: 4})
	paused := s.Subscribe()
	p.handle("session.send", func(p *peer, m peerMessage) any {
		p.answer(m.ID, map[string]any{"messageId": "m1"})
		p.send(p.event(s.ID(), "user.message", map[string]any{"messageId": "m1"}),
			p.event(s.ID(), "assistant.message", map[string]any{"content": "kept"}), p.event(s.ID(), "session.idle", nil))
		for range 1000 {
			p.emit(s.ID(), "x", nil, "ephemeral", true)
		}
		return noAnswer
	})
	m, err := s.SendAndWait(testContext(t), Message{Prompt: "hi"})
	if err != nil || m.Content != "kept" {
		t.Errorf("got %+v, %v", m, err)
	}
	p.sync()
	var lag *LagError
	if _, err := paused.Next(testContext(t)); !errors.As(err, &lag) {
		t.Errorf("the paused consumer got %v", err)
	}
}

func TestCase055ConsumerLeaves(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	two := func() { p.send(p.event(s.ID(), "one", nil), p.event(s.ID(), "two", nil)); p.sync() }
	subscribers := func() int {
		s.ring.mu.Lock()
		defer s.ring.mu.Unlock()
		return s.ring.subs
	}
	for name, leave := range map[string]func(iter.Seq2[Event, error]){
		"break": func(seq iter.Seq2[Event, error]) {
			for range seq {
				break
			}
		},
		"return": func(seq iter.Seq2[Event, error]) {
			func() error {
				for range seq {
					return io.EOF
				}
				return nil
			}()
		},
		"panic": func(seq iter.Seq2[Event, error]) {
			defer func() {
				if recover() != "body" {
					t.Error("the panic did not come through")
				}
			}()
			for range seq {
				panic("body")
			}
		},
		"pull": func(seq iter.Seq2[Event, error]) {
			pull, stop := iter.Pull2(seq)
			if e, err, ok := pull(); !ok || err != nil || e.Type != "one" {
				t.Errorf("pulled %v, %v, %v", e, err, ok)
			}
			stop()
		},
	} {
		seq := s.Events(context.Background())
		two()
		leave(seq)
		if n := subscribers(); n != 0 {
			t.Errorf("%s: %d subscribers left", name, n)
		}
		pairs := 0
		for _, err := range seq { // it was for one range
			if pairs++; !errors.Is(err, ErrClosed) {
				t.Errorf("%s: ranged again: %v", name, err)
			}
		}
		if pairs != 1 {
			t.Errorf("%s: ranged again: %d pairs", name, pairs)
		}
	}

	ctx, cancel := context.WithCancel(context.Background())
	_ = s.Events(ctx) // never ranged
	cancel()
	for subscribers() != 0 {
		runtime.Gosched() // the context package closes it on a goroutine of its own
	}

	sub := s.Subscribe()
	defer sub.Close()
	two()
	var got []EventType
	for range 2 { // a subscription goes on where the last range stopped
		for e, err := range sub.All(testContext(t)) {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, e.Type)
			break
		}
	}
	if !slices.Equal(got, []EventType{"one", "two"}) {
		t.Errorf("got %v", got)
	}
	two()
	for range sub.All(testContext(t)) { // one consumer at a time
		if _, err := sub.Next(testContext(t)); err == nil || errors.Is(err, io.EOF) {
			t.Errorf("a second consumer got %v", err)
		}
		break
	}
	gone, cancelled := context.WithCancelCause(context.Background())
	cancelled(io.ErrNoProgress)
	if _, err := sub.Next(gone); !errors.Is(err, context.Canceled) || !errors.Is(err, io.ErrNoProgress) {
		t.Errorf("with a ctx that is done: %v", err)
	}
	if e := next(t, sub); e.Type != "two" { // which has stayed
		t.Errorf("got %s", e.Type)
	}
}

func TestCase056SubscribersComeAndGo(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	one, two, three := s.Subscribe(), s.Subscribe(), s.Subscribe()
	p.emit(s.ID(), "1", nil)
	if e := next(t, one); e.Type != "1" {
		t.Errorf("first: %s", e.Type)
	}
	p.emit(s.ID(), "buffered", nil)
	p.sync()
	one.Close()
	one.Close()
	if e := next(t, two); e.Type != "1" {
		t.Errorf("second: %s", e.Type)
	}
	four := s.Subscribe()
	p.emit(s.ID(), "2", nil)
	if _, err := one.Next(testContext(t)); err != io.EOF {
		t.Errorf("after Close: %v", err)
	}
	for _, want := range []EventType{"1", "buffered", "2"} {
		if e := next(t, three); e.Type != want {
			t.Errorf("third: %s, want %s", e.Type, want)
		}
	}
	if e := next(t, four); e.Type != "2" { // what came before it was there is not for it
		t.Errorf("fourth: %s", e.Type)
	}
	waiting := async(func() error { _, err := four.Next(testContext(t)); return err })
	four.Close() // a consumer that waits, or is about to, returns
	if err := await(t, "consumer", waiting); err != io.EOF {
		t.Errorf("closed while waiting: %v", err)
	}
}

func TestCase058UnexpectedEvents(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	sub := s.Subscribe()
	events := []struct {
		event, data string
		typ         EventType
		broken      bool // as a payload
	}{
		{`{"type":"future.thing","data":{"a":1}}`, `{"a":1}`, "future.thing", false},
		{`{"type":"assistant.message","data":{"messageId":"a","content":"x","new":[1]},"newer":{}}`, `{"messageId":"a","content":"x","new":[1]}`, EventAssistantMessage, false},
		{`{"type":"assistant.message","data":{"messageId":{},"content":[]}}`, `{"messageId":{},"content":[]}`, EventAssistantMessage, true},
		{`{"type":"assistant.message","data":"text"}`, `"text"`, EventAssistantMessage, true},
		{`{"type":"session.idle"}`, ``, EventSessionIdle, false},
		{`{"type":"session.idle","data":null}`, `null`, EventSessionIdle, false},
		{`{"type":"x","data":1e999,"id":5,"timestamp":"yesterday","parentId":{},"agentId":[],"ephemeral":"yes"}`, `1e999`, "x", false},
		{`{"type":7,"data":12345678901234567890}`, `12345678901234567890`, "", false},
		{`{"type":"23"}`, ``, "23", false},
		{`{"type":1234}`, ``, "", false}, // not the one above
		{`{"type":"\u0078","data":"\ud800"}`, `"\ud800"`, "x", false},
		{`{}`, ``, "", false},
		{`{"type":"session.idle","data":{}}`, `{}`, EventSessionIdle, false},
	}
	for _, e := range events {
		p.raw([]byte(spineFrame(fmt.Sprintf(`{"method":"session.event","params":{"sessionId":%q,"event":%s}}`, s.ID(), e.event))))
		for _, bad := range []string{`null`, `[]`, `"x"`, `5`} { // no events: dropped, and nothing else
			p.raw([]byte(spineFrame(fmt.Sprintf(`{"method":"session.event","params":{"sessionId":%q,"event":%s}}`, s.ID(), bad))))
		}
	}
	for _, want := range events {
		e := next(t, sub)
		if e.Type != want.typ || string(e.Data) != want.data {
			t.Errorf("%s came as %q with %s", want.event, e.Type, e.Data)
		}
		raw, _ := e.Payload().(*RawPayload)
		if broken := raw != nil && raw.Err != nil; broken != want.broken {
			t.Errorf("%s: payload %T", want.event, e.Payload())
		}
	}
}

// ---- turns ----

// spineEvent makes an event for a session at the peer.
type spineEvent func(p *peer, session string) any

func spineEv(typ string, data map[string]any, extra ...any) spineEvent {
	return func(p *peer, session string) any { return p.event(session, typ, data, extra...) }
}

func spineUser(id string) spineEvent {
	return spineEv("user.message", map[string]any{"messageId": id, "content": "hi"})
}

func spineSays(text string, extra ...any) spineEvent {
	return spineEv("assistant.message", map[string]any{"messageId": "a", "content": text}, extra...)
}

func spineFails(origin string, members ...string) spineEvent {
	data := map[string]any{"errorType": "query", "message": "no luck", "statusCode": 500}
	if origin != "" {
		data["originatingMessageId"] = origin
	}
	for _, name := range members {
		data[name] = true
	}
	return spineEv("session.error", data)
}

// spineScripted makes the peer send events around its answer to session.send.
func spineScripted(p *peer, early, late []spineEvent) {
	p.handle("session.send", func(p *peer, m peerMessage) any {
		session := m.get("sessionId").(string)
		var out []any
		for _, e := range early {
			out = append(out, e(p, session))
		}
		out = append(out, map[string]any{"jsonrpc": "2.0", "id": m.ID, "result": map[string]any{"messageId": "m1"}})
		for _, e := range late {
			out = append(out, e(p, session))
		}
		p.send(out...)
		return noAnswer
	})
}

// spineHandled waits until the n-th request of a method was handled at the peer, and what was sent for it at the client.
func spineHandled(p *peer, method string, n int) {
	p.t.Helper()
	p.wait(method, n)
	p.sync() // its answer is read when the handler has returned
	p.sync()
}

func TestTurnRules(t *testing.T) {
	idle, aborted := spineEv("session.idle", nil), spineEv("session.idle", map[string]any{"aborted": true})
	abort, shutdown := spineEv("abort", map[string]any{"reason": "user_initiated"}), spineEv("session.shutdown", nil)
	own, other := spineUser("m1"), spineUser("m0")
	agent := []any{"agentId", "sub"}
	failed := func(err error) bool {
		var e *AgentError
		return errors.As(err, &e) && e.Type == "query" && e.Message == "no luck" && e.StatusCode == 500
	}
	isAborted := func(err error) bool { return errors.Is(err, ErrAborted) }
	isClosed := func(err error) bool { return errors.Is(err, ErrClosed) }
	type script []spineEvent
	for _, tt := range []struct {
		name                string
		resume              bool
		before, early, late script // before the message, before the answer to it, and after that
		want                string
		is                  func(error) bool // nil: no error
		asked               string           // what Ask yields
		doubt               bool             // the server is asked whether it still works
	}{
		{name: "plain", late: script{own, spineSays("a"), idle}, want: "a",
			asked: "user.message assistant.message session.idle"},
		{name: "over before the answer", early: script{own, spineSays("a"), idle}, want: "a",
			asked: "user.message assistant.message session.idle"},
		{name: "begun before the answer", early: script{own}, late: script{spineSays("a"), idle}, want: "a",
			asked: "user.message assistant.message session.idle"},
		{name: "last message wins", late: script{own, spineSays("a"), spineSays("b"), idle}, want: "b"},
		{name: "no message", late: script{own, idle}, asked: "user.message session.idle"},
		{name: "no user.message", late: script{spineSays("a"), idle}, want: "a", asked: "assistant.message session.idle"},
		{name: "dropped from the queue", late: script{idle}, asked: "session.idle"},
		{name: "end of a round is no end", late: script{own, spineEv("assistant.turn_end", nil), spineEv("assistant.idle", nil), spineSays("a"), idle}, want: "a"},

		{name: "idle of an earlier run before the answer", before: script{other}, early: script{spineSays("old"), idle}, late: script{own, spineSays("a"), idle}, want: "a",
			asked: "user.message assistant.message session.idle"},
		{name: "idle of an earlier run after the answer", before: script{other}, late: script{spineSays("old"), idle, own, spineSays("a"), idle}, want: "a",
			asked: "user.message assistant.message session.idle"},
		{name: "idle of a run that began before the answer", early: script{other}, late: script{spineSays("old"), idle, own, spineSays("a"), idle}, want: "a"},
		{name: "idle of a run that began after the answer", late: script{other, spineSays("old"), idle, own, spineSays("a"), idle}, want: "a"},
		{name: "one idle for a queue", before: script{other}, late: script{spineSays("old"), own, spineSays("a"), idle}, want: "a",
			asked: "user.message assistant.message session.idle"},
		{name: "earlier run fails", before: script{other}, late: script{spineFails("m0"), own, spineSays("a"), idle}, want: "a"},
		{name: "earlier run fails and does not say which", before: script{other}, late: script{spineFails(""), own, spineSays("a"), idle}, want: "a",
			asked: "user.message assistant.message session.idle"},
		{name: "earlier run fails before the answer", before: script{other}, early: script{spineFails(""), idle}, late: script{own, spineSays("a"), idle}, want: "a"},
		{name: "earlier run was aborted", before: script{other, abort}, late: script{aborted, own, spineSays("a"), idle}, want: "a"},
		{name: "earlier run is aborted before the answer", before: script{other}, early: script{abort, aborted}, late: script{own, spineSays("a"), idle}, want: "a"},
		{name: "earlier run has ended by an error, its idle comes late", before: script{other, spineFails("m0")}, late: script{idle, own, spineSays("a"), idle}, want: "a"},

		{name: "replay before the message", resume: true, before: script{other, spineSays("old"), idle}, late: script{own, spineSays("new"), idle}, want: "new"},
		{name: "replay before the answer", resume: true, early: script{other, spineSays("old"), idle}, late: script{own, spineSays("new"), idle}, want: "new"},
		{name: "replay after the answer", resume: true, late: script{other, spineSays("old"), idle, own, spineSays("new"), idle}, want: "new",
			asked: "user.message assistant.message session.idle"},
		{name: "bare idle after a resume", resume: true, late: script{idle, own, spineSays("new"), idle}, want: "new"},

		{name: "error", late: script{own, spineSays("part"), spineFails("m1")}, want: "part", is: failed,
			asked: "user.message assistant.message session.error"},
		{name: "error and nothing else", late: script{spineFails("")}, is: failed, asked: "session.error"},
		{name: "error before the answer", early: script{spineFails("m1")}, is: failed, asked: "session.error"},
		{name: "error of the whole run before the answer", early: script{own, spineFails("m1"), idle}, is: failed, asked: "user.message session.error"},
		{name: "error that another model may mend", late: script{own, spineFails("m1", "eligibleForAutoSwitch"), spineSays("a"), idle}, want: "a"},
		{name: "error of a later message", late: script{own, spineFails("m2"), spineSays("a"), idle}, want: "a"},
		{name: "abort", late: script{own, spineSays("part"), abort}, want: "part", is: isAborted, asked: "user.message assistant.message abort"},
		{name: "abort that only idle tells of", late: script{own, spineSays("part"), aborted}, want: "part", is: isAborted},
		{name: "abort before the run", late: script{abort, aborted}, is: isAborted, asked: "abort"},
		{name: "shutdown", late: script{own, shutdown}, is: isClosed, asked: "user.message session.shutdown"},
		{name: "sub-agents", late: script{own, spineSays("sub", agent...), spineEv("session.idle", nil, agent...), spineEv("abort", nil, agent...),
			spineEv("session.error", map[string]any{"errorType": "query"}, agent...), spineSays("a"), spineSays("sub", agent...), idle}, want: "a"},

		{name: "another message behind ours", late: script{own, spineSays("a"), other, spineSays("b"), idle}, want: "b"},
		{name: "dropped behind an earlier run", doubt: true, before: script{other}, late: script{spineSays("old"), idle}, want: "old",
			asked: "assistant.message session.idle"}, // what follows the answer counts then
		{name: "failed behind an earlier run", doubt: true, before: script{other}, late: script{spineFails(""), idle}, is: failed},
	} {
		t.Run(tt.name, func(t *testing.T) {
			leakCheck(t)
			for _, ask := range []bool{false, true} {
				c, p := newPeer(t, nil)
				var s *Session
				if tt.resume {
					var err error
					if s, err = c.ResumeSession(testContext(t), "s", nil); err != nil {
						t.Fatal(err)
					}
				} else {
					s = createSession(t, c, nil)
				}
				for _, e := range tt.before {
					p.send(e(p, s.ID()))
				}
				p.sync()
				spineScripted(p, tt.early, tt.late)
				var text string
				var err error
				if !ask {
					var m *AssistantMessage
					if m, err = s.SendAndWait(testContext(t), Message{Prompt: "hi"}); m != nil {
						text = m.Content
					}
				} else {
					var types []string
					for e, pairErr := range s.Ask(testContext(t), Message{Prompt: "hi"}) {
						if err != nil {
							t.Errorf("a pair after the last one: %v, %v", e.Type, pairErr)
						}
						if err = pairErr; err != nil {
							continue
						}
						types = append(types, string(e.Type))
						if m, ok := e.Payload().(*AssistantMessage); ok && e.AgentID == "" {
							text = m.Content
						}
					}
					if got := strings.Join(types, " "); tt.asked != "" && got != tt.asked {
						t.Errorf("Ask yields %s, want %s", got, tt.asked)
					}
				}
				if tt.is == nil && err != nil || tt.is != nil && !tt.is(err) {
					t.Errorf("Ask=%v: got %v", ask, err)
				}
				if asked := len(p.calls("session.metadata.isProcessing")) > 0; asked != tt.doubt {
					t.Errorf("Ask=%v: the server was asked: %v", ask, asked)
				}
				if text != tt.want {
					t.Errorf("Ask=%v: got %q, want %q", ask, text, tt.want)
				}
			}
		})
	}
}

// TestTurnAfterTurn is about what one turn leaves to the next.
func TestTurnAfterTurn(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	idle := spineEv("session.idle", nil)
	own := spineUser("m1") // every message gets this id here, which makes nothing easier
	ask := func(early, late []spineEvent) (string, error) {
		spineScripted(p, early, late)
		m, err := s.SendAndWait(testContext(t), Message{Prompt: "hi"})
		if m == nil {
			m = &AssistantMessage{}
		}
		return m.Content, err
	}
	var failed *AgentError
	if _, err := ask(nil, []spineEvent{own, spineFails("m1")}); !errors.As(err, &failed) {
		t.Fatal(err)
	}
	if text, err := ask([]spineEvent{idle}, []spineEvent{own, spineSays("b"), idle}); text != "b" || err != nil {
		t.Errorf("its idle before the next answer: %q, %v", text, err)
	}
	if _, err := ask(nil, []spineEvent{own, spineFails("m1")}); !errors.As(err, &failed) {
		t.Fatal(err)
	}
	if text, err := ask(nil, []spineEvent{idle, own, spineSays("c"), idle}); text != "c" || err != nil {
		t.Errorf("its idle after the next answer: %q, %v", text, err)
	}
	if _, err := ask(nil, []spineEvent{own, spineFails("m1")}); !errors.As(err, &failed) {
		t.Fatal(err)
	}
	if text, err := ask(nil, []spineEvent{own, spineSays("d"), idle}); text != "d" || err != nil {
		t.Errorf("its idle never comes: %q, %v", text, err)
	}
	if _, err := ask(nil, []spineEvent{own, spineEv("abort", nil)}); !errors.Is(err, ErrAborted) {
		t.Fatal(err)
	}
	if text, err := ask(nil, []spineEvent{spineEv("session.idle", map[string]any{"aborted": true}), own, spineSays("e"), idle}); text != "e" || err != nil {
		t.Errorf("idle of an aborted turn: %q, %v", text, err)
	}

	// A loop that is left early leaves the slot free, and its run to the server.
	spineScripted(p, nil, []spineEvent{own, spineSays("part")})
	for e, err := range s.Ask(testContext(t), Message{Prompt: "hi"}) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Type == EventAssistantMessage {
			break
		}
	}
	if text, err := ask(nil, []spineEvent{spineSays("rest"), idle, own, spineSays("f"), idle}); text != "f" || err != nil {
		t.Errorf("after an early exit: %q, %v", text, err)
	}
	if n := len(p.calls("session.abort")); n > 0 {
		t.Error("leaving the loop has aborted the turn")
	}

	// A send that was refused announces nothing.
	p.refuse("session.send", codeInternal, "no")
	if _, err := s.Send(testContext(t), Message{Prompt: "hi"}); err == nil {
		t.Error("refused?")
	}
	if _, err := s.SendAndWait(testContext(t), Message{Prompt: "hi"}); err == nil {
		t.Error("refused?")
	}
	if text, err := ask(nil, []spineEvent{idle}); text != "" || err != nil {
		t.Errorf("after refusals: %q, %v", text, err)
	}
	if n := len(p.calls("session.metadata.isProcessing")); n > 0 {
		t.Errorf("the server was asked %d times whether it works: nothing here leaves a doubt for long", n)
	}
}

func TestOneTurnAtATime(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s, free := createSession(t, c, nil), createSession(t, c, nil)
	spineScripted(p, nil, []spineEvent{spineUser("m1")})
	first := async(func() error { _, err := s.SendAndWait(testContext(t), Message{Prompt: "hi"}); return err })
	spineHandled(p, "session.send", 1)
	if _, err := s.SendAndWait(testContext(t), Message{Prompt: "hi"}); !errors.Is(err, ErrTurnActive) {
		t.Errorf("SendAndWait: %v", err)
	}
	pairs := 0
	for _, err := range s.Ask(testContext(t), Message{Prompt: "hi"}) {
		if pairs++; !errors.Is(err, ErrTurnActive) {
			t.Errorf("Ask: %v", err)
		}
	}
	if n := len(p.calls("session.send")); n != 1 || pairs != 1 {
		t.Errorf("%d messages sent, %d pairs", n, pairs)
	}
	if _, err := s.Send(testContext(t), Message{Prompt: "steer"}); err != nil { // is no turn that somebody waits for
		t.Error(err)
	}
	other := async(func() error { _, err := free.SendAndWait(testContext(t), Message{Prompt: "hi"}); return err })
	spineHandled(p, "session.send", 3)
	for _, id := range []string{s.ID(), free.ID()} {
		p.emit(id, "session.idle", nil)
	}
	for _, turn := range []<-chan error{first, other} {
		if err := await(t, "turn", turn); err != nil {
			t.Error(err)
		}
	}
}

func TestAskWithASmallRing(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	const size = 4
	for _, tt := range []struct {
		name          string
		inside, after int // deltas of the turn, events after its end, while the consumer is busy with the first event
		skipped       uint64
		seen          int
	}{
		{"keeps pace", 0, 0, 0, 2},
		{"just fits", 3, 0, 0, 5},
		{"gap inside the turn", 20, 0, 17, 5},
		{"gap over the end", 20, 2, 19, 3},
		{"gap up to the end", 20, 4, 21, 1},
		{"gap beyond the end", 20, 50, 21, 1},
		{"gap after the end", 0, 3, 0, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := createSession(t, c, &SessionConfig{EventBuffer: size})
			late := []spineEvent{spineUser("m1")}
			spineScripted(p, nil, late)
			var seen int
			var skipped uint64
			for e, err := range s.Ask(testContext(t), Message{Prompt: "hi"}) {
				var lag *LagError
				switch {
				case errors.As(err, &lag):
					skipped += lag.Skipped
				case err != nil:
					t.Fatal(err)
				default:
					seen++
				}
				if e.Type == EventUserMessage {
					for range tt.inside {
						p.emit(s.ID(), "assistant.message_delta", nil)
					}
					p.emit(s.ID(), "session.idle", nil)
					for range tt.after {
						p.emit(s.ID(), "x", nil)
					}
					p.sync()
				}
			}
			if seen != tt.seen || skipped != tt.skipped || seen+int(skipped) != tt.inside+2 {
				t.Errorf("saw %d and %d skipped, want %d and %d", seen, skipped, tt.seen, tt.skipped)
			}
		})
	}
	t.Run("error before the answer, then a flood", func(t *testing.T) {
		s := createSession(t, c, &SessionConfig{EventBuffer: size})
		late := slices.Repeat([]spineEvent{spineEv("x", nil)}, 50)
		spineScripted(p, []spineEvent{spineFails("m1")}, late)
		for _, err := range s.Ask(testContext(t), Message{Prompt: "hi"}) {
			var lag *LagError
			if errors.As(err, &lag) && lag.Skipped > 1 {
				t.Errorf("%d skipped", lag.Skipped)
			}
		}
	})
}

// TestTurnFloodedBeforeTheAnswer is about more events of other runs than are kept while a send is unanswered.
func TestTurnFloodedBeforeTheAnswer(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	early := slices.Repeat([]spineEvent{spineSays("old")}, 2*maxEarly)
	spineScripted(p, append(early, spineUser("m1"), spineSays("a"), spineEv("session.idle", nil)), nil)
	m, err := s.SendAndWait(testContext(t), Message{Prompt: "hi"})
	if err != nil || m.Content != "a" {
		t.Errorf("got %+v, %v", m, err)
	}
}

// TestTurnDroppedWhileTheServerWorks is about the question that settles whether a message is still in the queue.
func TestTurnDroppedWhileTheServerWorks(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	p.emit(s.ID(), "user.message", map[string]any{"messageId": "m0"})
	p.sync()
	asked := 0
	p.handle("session.metadata.isProcessing", func(p *peer, m peerMessage) any {
		switch asked++; asked {
		case 1:
			return noAnswer // in time, which proves nothing
		case 2:
			return map[string]any{"processing": true}
		}
		p.send(spineUser("m1")(p, s.ID()), spineSays("a")(p, s.ID()), spineEv("session.idle", nil)(p, s.ID()))
		return map[string]any{"processing": false} // too late to mean anything
	})
	spineScripted(p, nil, []spineEvent{spineEv("session.idle", nil)})
	m, err := s.SendAndWait(testContext(t), Message{Prompt: "hi"})
	if err != nil || m == nil || m.Content != "a" || asked != 3 {
		t.Errorf("asked %d times, got %+v, %v", asked, m, err)
	}
}

func TestCase060ParallelTurns(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	p.handle("session.send", func(p *peer, m peerMessage) any {
		session, prompt := m.get("sessionId").(string), m.get("prompt").(string)
		id := "m-" + prompt
		p.send(map[string]any{"jsonrpc": "2.0", "id": m.ID, "result": map[string]any{"messageId": id}},
			p.event(session, "user.message", map[string]any{"messageId": id}),
			p.event(session, "assistant.message_delta", map[string]any{"deltaContent": prompt}),
			p.event(session, "assistant.message", map[string]any{"content": "to " + prompt}),
			p.event(session, "session.idle", nil))
		return noAnswer
	})
	var sessions []<-chan error
	for i := range 20 {
		s := createSession(t, c, nil)
		sessions = append(sessions, async(func() error {
			for turn := range 50 {
				prompt := fmt.Sprintf("%d.%d", i, turn)
				ctx := testContext(t)
				if turn%2 == 0 {
					m, err := s.SendAndWait(ctx, Message{Prompt: prompt})
					if err != nil || m.Content != "to "+prompt {
						return fmt.Errorf("%s: %+v, %v", prompt, m, err)
					}
					continue
				}
				var got []string
				for e, err := range s.Ask(ctx, Message{Prompt: prompt}) {
					if err != nil {
						return err
					}
					switch m := e.Payload().(type) {
					case *AssistantMessageDelta:
						got = append(got, m.DeltaContent)
					case *AssistantMessage:
						got = append(got, m.Content)
					}
				}
				if want := []string{prompt, "to " + prompt}; !slices.Equal(got, want) {
					return fmt.Errorf("got %q, want %q", got, want)
				}
			}
			return nil
		}))
	}
	for _, s := range sessions {
		if err := await(t, "session", s); err != nil {
			t.Error(err)
		}
	}
}

func TestCase066OneTerminalPair(t *testing.T) {
	for name, tt := range map[string]struct {
		end  func(c *Client, s *Session, p *peer)
		want error
	}{
		"connection lost": {func(c *Client, s *Session, p *peer) { p.conn.Close() }, io.ErrUnexpectedEOF},
		"session closed":  {func(c *Client, s *Session, p *peer) { s.Disconnect(testContext(t)) }, ErrClosed},
		"session deleted": {func(c *Client, s *Session, p *peer) {
			p.send(notification("session.lifecycle", map[string]any{"type": "session.deleted", "sessionId": s.ID()}))
		}, ErrSessionNotFound},
		"client stopped": {func(c *Client, s *Session, p *peer) { c.Stop(testContext(t)) }, ErrClosed},
		"client killed":  {func(c *Client, s *Session, p *peer) { c.ForceStop() }, ErrClosed},
	} {
		for _, begun := range []bool{false, true} { // whether the turn's user.message has come
			t.Run(fmt.Sprintf("%s begun=%v", name, begun), func(t *testing.T) {
				leakCheck(t)
				c, p := newPeer(t, nil)
				s := createSession(t, c, nil)
				var late []spineEvent
				if begun {
					late = []spineEvent{spineUser("m1"), spineSays("part")}
				} else {
					p.emit(s.ID(), "user.message", map[string]any{"messageId": "m0"})
				}
				p.sync()
				spineScripted(p, nil, late)
				result := async(func() error {
					events, terminal := 0, 0
					for _, err := range s.Ask(testContext(t), Message{Prompt: "hi"}) {
						if err == nil {
							if events++; terminal > 0 {
								return errors.New("an event after the last pair")
							}
							continue
						}
						if terminal++; !errors.Is(err, tt.want) {
							return err
						}
					}
					if events != len(late) || terminal != 1 {
						return fmt.Errorf("%d events, %d terminal pairs", events, terminal)
					}
					return nil
				})
				spineHandled(p, "session.send", 1)
				tt.end(c, s, p)
				if err := await(t, "Ask", result); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

func TestCase067NoTimerIsLeft(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	spineScripted(p, nil, []spineEvent{spineUser("m1"), spineEv("session.idle", nil)})
	if _, err := s.SendAndWait(ctx, Message{Prompt: "hi"}); err != nil {
		t.Error(err)
	}
	// The library's own timer of a turn, which only doubt winds up, is gone with the doubt: when the turn's own message comes, or nobody waits.
	for i, begins := range []bool{true, false} {
		p.emit(s.ID(), "user.message", map[string]any{"messageId": "m0"})
		spineScripted(p, nil, []spineEvent{spineEv("session.idle", nil)})
		left, leave := context.WithCancel(ctx)
		waited := async(func() error { _, err := s.SendAndWait(left, Message{Prompt: "hi"}); return err })
		spineHandled(p, "session.send", 2+i)
		s.mu.Lock()
		turn := s.turns.active
		wound := turn != nil && turn.backstop != nil
		s.mu.Unlock()
		if !wound {
			t.Fatal("no doubt")
		}
		if begins {
			p.emit(s.ID(), "user.message", map[string]any{"messageId": "m1"})
			p.sync()
		} else {
			leave()
			if err := await(t, "turn", waited); !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		}
		s.mu.Lock()
		if turn.backstop != nil {
			t.Errorf("begins=%v: the timer still runs", begins)
		}
		s.mu.Unlock()
		if begins {
			p.emit(s.ID(), "session.idle", nil)
			if err := await(t, "turn", waited); err != nil {
				t.Error(err)
			}
		}
		leave()
	}
}

func TestCase068CancelledWait(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	why := errors.New("enough")
	var e *TurnError

	gone, cancel := context.WithCancelCause(context.Background())
	cancel(why)
	if _, err := s.SendAndWait(gone, Message{Prompt: "hi"}); !errors.Is(err, why) || errors.As(err, &e) {
		t.Errorf("cancelled before: %v", err)
	}
	pairs := 0
	for _, err := range s.Ask(gone, Message{Prompt: "hi"}) {
		if pairs++; !errors.Is(err, why) || !errors.Is(err, context.Canceled) {
			t.Errorf("Ask cancelled before: %v", err)
		}
	}
	if n := len(p.calls("session.send")); n != 0 || pairs != 1 {
		t.Errorf("%d messages sent, %d pairs", n, pairs)
	}

	p.handle("session.send", func(*peer, peerMessage) any { return noAnswer })
	for _, answered := range []bool{false, true} {
		if answered {
			spineScripted(p, nil, []spineEvent{spineUser("m1"), spineEv("assistant.turn_start", nil),
				spineEv("tool.execution_start", map[string]any{"toolCallId": "t1", "toolName": "bash"}),
				spineEv("permission.requested", map[string]any{"requestId": "p1"})})
		}
		for _, ask := range []bool{false, true} {
			ctx, cancel := context.WithCancelCause(context.Background())
			sent := len(p.calls("session.send"))
			waited := async(func() (err error) {
				if !ask {
					_, err = s.SendAndWait(ctx, Message{Prompt: "hi"})
					return err
				}
				for _, err = range s.Ask(ctx, Message{Prompt: "hi"}) {
				}
				return err
			})
			spineHandled(p, "session.send", sent+1)
			cancel(why)
			err := await(t, "turn", waited)
			if !errors.As(err, &e) || !errors.Is(err, why) || !errors.Is(err, context.Canceled) {
				t.Fatalf("answered=%v Ask=%v: %v", answered, ask, err)
			}
			if answered && (e.LastEvent != "permission.requested" || !slices.Equal(e.OpenTools, []string{"bash"}) || e.OpenPermissions != 1 || e.Events != 4) {
				t.Errorf("Ask=%v: %+v", ask, e)
			}
		}
	}
	p.sync()
	if n := len(p.calls("session.abort")); n > 0 {
		t.Errorf("%d aborts", n)
	}
	if n := len(p.calls("session.send")); n != 4 {
		t.Errorf("%d messages sent", n)
	}
}

// ---- nobody waits for the host's slowness ----

// spineLogger is a slog.Handler made of a function.
type spineLogger func(slog.Record)

func (l spineLogger) Enabled(context.Context, slog.Level) bool      { return true }
func (l spineLogger) Handle(_ context.Context, r slog.Record) error { l(r); return nil }
func (l spineLogger) WithAttrs([]slog.Attr) slog.Handler            { return l }
func (l spineLogger) WithGroup(string) slog.Handler                 { return l }

func TestReaderDoesNotWaitForTheLogger(t *testing.T) {
	leakCheck(t)
	var c *Client
	var messages []string
	lost := 0
	release, connected, logged := make(chan struct{}), make(chan struct{}), make(chan struct{})
	logger := slog.New(spineLogger(func(r slog.Record) {
		<-connected
		if err := c.Call(testContext(t), "from.the.log", nil, nil); err != nil {
			t.Errorf("a call from the logger: %v", err)
		}
		<-release
		messages = append(messages, r.Message)
		r.Attrs(func(a slog.Attr) bool {
			if a.Key == "lost" {
				lost += int(a.Value.Int64())
				close(logged)
			}
			return true
		})
	}))
	c, p := newPeer(t, &Options{Logger: logger})
	close(connected)
	const each = 2 * maxAside
	for i := range each {
		p.send(map[string]any{"id": 1000 + i, "result": 1}, map[string]any{"x": i}, notification("session.event", nil))
	}
	if err := c.Call(testContext(t), "ping", nil, nil); err != nil {
		t.Error(err)
	}
	close(release)
	await(t, "record of the losses", logged)
	if n := len(messages) - 1 + lost; n != 3*each {
		t.Errorf("%d records and %d lost, want %d", len(messages)-1, lost, 3*each)
	}
	p.wait("from.the.log", len(messages))
}

func TestCase083VersionMismatch(t *testing.T) {
	for _, tt := range []struct {
		connect, ping string // results
		server        int
	}{
		{`{"ok":true,"version":"9.8.7"}`, ``, 0},
		{`{"protocolVersion":null,"version":"9.8.7"}`, ``, 0},
		{`{"protocolVersion":1,"version":"9.8.7"}`, ``, 1},
		{`{"protocolVersion":2,"version":"9.8.7"}`, ``, 2},
		{`{"protocolVersion":3,"version":"9.8.7"}`, ``, 3},
		{`{"protocolVersion":4,"version":"9.8.7"}`, ``, 4},
		{`{"protocolVersion":"3","version":"9.8.7"}`, ``, 0},
		{`{"protocolVersion":-3,"version":"9.8.7"}`, ``, -3},
		{`{"PROTOCOLVERSION":3,"version":"9.8.7"}`, ``, 0},
		{`["9.8.7"]`, ``, 0},
		{``, `{"protocolVersion":3}`, 3},
		{``, `{"message":"pong"}`, 0},
	} {
		leakCheck(t)
		near, far := net.Pipe()
		p := startPeer(t, far)
		p.handle("connect", func(*peer, peerMessage) any {
			if tt.connect == "" {
				return &peerError{Code: codeMethodNotFound, Message: "Unhandled method connect"}
			}
			return json.RawMessage(tt.connect)
		})
		p.handle("ping", func(*peer, peerMessage) any { return json.RawMessage(tt.ping) })
		c, err := NewClient(testContext(t), near, nil)
		if tt.server == 3 {
			if err != nil || c.Server().ProtocolVersion != 3 || tt.connect != "" && c.Server().Version != "9.8.7" {
				t.Errorf("%s%s: %v", tt.connect, tt.ping, err)
				continue
			}
			c.ForceStop()
			continue
		}
		var e *ProtocolError
		if c != nil || !errors.As(err, &e) || e.Server != tt.server || e.Min != 3 || e.Max != 3 || strings.HasPrefix(tt.connect, "{") && !strings.Contains(err.Error(), "9.8.7") {
			t.Errorf("%s%s: %v", tt.connect, tt.ping, err)
		}
	}
	t.Run("names the program", func(t *testing.T) {
		spineFlat(t)
		o := spineOptions(t, spineScript{On: map[string]string{"connect": `result {"protocolVersion":2}`}})
		if _, err := Start(testContext(t), o); err == nil || !strings.Contains(err.Error(), filepath.Base(o.CLI)) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("unknown option", func(t *testing.T) {
		spineFlat(t)
		o := spineOptions(t, spineScript{Stderr: "error: unexpected argument '--headless' found\n", On: map[string]string{"connect": "exit 1"}})
		o.Args, o.GitHubToken = []string{"--theirs", "token-in-argv"}, "token-in-argv"
		_, err := Start(testContext(t), o)
		var e *ExitError
		if !errors.As(err, &e) || e.State.ExitCode() != 1 {
			t.Fatalf("got %v", err)
		}
		for _, want := range []string{"unexpected argument '--headless'", "--theirs", "--no-auto-update"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q is not in %v", want, err)
			}
		}
		if strings.Contains(err.Error(), "token-in-argv") {
			t.Errorf("a secret in %v", err)
		}
	})
}

func TestCase084Authentication(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	const words = "Request session.create failed with message: not authenticated, please log in"
	p.refuse("session.create", codeInternal, words)
	_, err := c.CreateSession(testContext(t), nil)
	var rpc *RPCError
	if !errors.Is(err, ErrAuthentication) || !errors.As(err, &rpc) || rpc.Message != words {
		t.Errorf("create: %v", err)
	}
	p.handle("session.create", func(p *peer, m peerMessage) any { return map[string]any{"sessionId": m.get("sessionId")} })
	s := createSession(t, c, nil)
	spineScripted(p, nil, []spineEvent{spineEv("session.error", map[string]any{"errorType": "authentication", "statusCode": 401, "message": "token expired"})})
	_, err = s.SendAndWait(testContext(t), Message{Prompt: "hi"})
	var agent *AgentError
	if !errors.Is(err, ErrAuthentication) || !errors.As(err, &agent) || agent.Message != "token expired" || agent.StatusCode != 401 {
		t.Errorf("turn: %v", err)
	}
	p.handle("auth.getStatus", func(*peer, peerMessage) any {
		return map[string]any{"isAuthenticated": false, "statusMessage": "not logged in"}
	})
	if status, err := c.AuthStatus(testContext(t)); err != nil || status.IsAuthenticated || status.StatusMessage != "not logged in" {
		t.Errorf("status: %+v, %v", status, err)
	}
	near, far := net.Pipe()
	strict := startPeer(t, far)
	strict.refuse("connect", -32001, "AUTHENTICATION_REQUIRED")
	if _, err := NewClient(testContext(t), near, nil); !errors.Is(err, ErrAuthentication) {
		t.Errorf("handshake: %v", err)
	}
}

func TestCase090OptionsAreCopied(t *testing.T) {
	spineFlat(t)
	o := spineOptions(t, spineScript{On: map[string]string{"plugins.builtin.set": "result {}"}})
	o.PluginDirs = []string{t.TempDir()}
	o.Handlers = map[string]HandlerFunc{"custom": func(context.Context, string, json.RawMessage) (any, error) { return nil, nil }}
	before := fmt.Sprintf("%#v %#v %#v", o.Env, o.PluginDirs, len(o.Handlers))
	c := spineStart(t, o)
	if after := fmt.Sprintf("%#v %#v %#v", o.Env, o.PluginDirs, len(o.Handlers)); after != before {
		t.Error("Start has changed the options")
	}
	o.Env[0], o.PluginDirs[0] = "X=y", "relative"
	o.Handlers["custom"] = nil
	delete(o.Handlers, "custom")
	if c.opts.Env[0] == "X=y" || c.opts.PluginDirs[0] == "relative" || c.opts.Handlers["custom"] == nil {
		t.Error("the client shares the caller's slices and maps")
	}

	near, far := net.Pipe()
	p := startPeer(t, far)
	d, err := NewClient(testContext(t), near, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer d.ForceStop()
	s := createSession(t, d, nil)
	m := Message{Prompt: "hi", RequestHeaders: map[string]string{"X-A": "1"}}
	if _, err := s.Send(testContext(t), m); err != nil {
		t.Fatal(err)
	}
	m.RequestHeaders["X-A"] = "2" // the race detector tells who still reads it
	if got := p.wait("session.send", 1).get("requestHeaders"); fmt.Sprint(got) != "map[X-A:1]" {
		t.Errorf("sent %v", got)
	}
}

func TestCase091NothingIsPrinted(t *testing.T) {
	for _, logged := range []bool{false, true} {
		t.Run(fmt.Sprintf("Logger=%v", logged), func(t *testing.T) {
			spineFlat(t)
			spineSilent(t)
			var records atomic.Int64
			o := func(o *Options) *Options {
				if logged {
					o.Logger = slog.New(spineLogger(func(slog.Record) { records.Add(1) }))
				}
				return o
			}
			near, far := net.Pipe()
			p := startPeer(t, far)
			c, err := NewClient(testContext(t), near, o(&Options{Handlers: map[string]HandlerFunc{
				"custom.panic": func(context.Context, string, json.RawMessage) (any, error) { panic("handler") },
			}}))
			if err != nil {
				t.Fatal(err)
			}
			s := createSession(t, c, nil)
			p.send(notification("session.event", 5), notification("session.lifecycle", []int{}), map[string]any{"id": 77, "result": 1}, map[string]any{}, notification("future", nil))
			p.request("custom.panic", nil)
			p.request("future.method", nil)
			p.handle("session.getMessages", func(*peer, peerMessage) any { return map[string]any{"events": []any{5, "x", map[string]any{}}} })
			if events, err := s.History(testContext(t)); err != nil || len(events) != 1 {
				t.Errorf("history: %d events, %v", len(events), err)
			}
			spineScripted(p, nil, []spineEvent{spineUser("m1"), spineFails("m1")})
			s.SendAndWait(testContext(t), Message{Prompt: "hi"})
			p.raw([]byte("garbage\n"))
			await(t, "client's end", c.Done())
			c.Stop(testContext(t))

			child := o(spineOptions(t, spineScript{Stderr: "words on stderr\n", Flood: 1000, On: map[string]string{"die": "exit 1"}}))
			d := spineStart(t, child)
			d.Call(testContext(t), "die", nil, nil)
			await(t, "client's end", d.Done())
			if _, err := Start(testContext(t), o(spineOptions(t, spineScript{On: map[string]string{"connect": "raw garbage\n"}}))); err == nil {
				t.Error("started")
			}
			if logged && records.Load() == 0 {
				t.Error("nothing was logged")
			}
		})
	}
}

// TestBadInput is about starts that cannot succeed: each has its own error, in time, and leaves nothing.
func TestBadInput(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing")
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	is := func(target error, words ...string) func(error) bool {
		return func(err error) bool {
			return errors.Is(err, target) && !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(err.Error(), w) })
		}
	}
	frame := func(err error) bool { var e *FrameError; return errors.As(err, &e) && len(e.Quote) <= 256 }
	for _, tt := range []struct {
		name   string
		script spineScript
		change func(*Options)
		is     func(error) bool
	}{
		{"no CLI", spineScript{}, func(o *Options) { o.CLI = missing }, is(ErrCLINotFound, "missing")},
		{"no CLI on PATH", spineScript{}, func(o *Options) { o.CLI = ""; o.Env = []string{"PATH=" + filepath.Dir(missing)} }, is(ErrCLINotFound, filepath.Dir(missing))},
		{"no directory", spineScript{}, func(o *Options) { o.Dir = missing }, is(ErrInvalidConfig, "missing")},
		{"a file as directory", spineScript{}, func(o *Options) { o.Dir = file }, is(ErrInvalidConfig, "file")},
		{"both", spineScript{}, func(o *Options) { o.CLI, o.Dir = missing+"CLI", missing }, is(ErrInvalidConfig, "missing")},
		{"ModeEmpty", spineScript{}, func(o *Options) { o.Mode = ModeEmpty }, is(ErrInvalidConfig)},
		{"token over stdio", spineScript{}, func(o *Options) { o.ConnectionToken = "x" }, is(ErrInvalidConfig)},
		{"negative", spineScript{}, func(o *Options) { o.MaxFrameBytes = -1 }, is(ErrInvalidConfig, "MaxFrameBytes")},
		{"garbage", spineScript{Print: strings.Repeat("\x1b", 300) + "\n"}, nil, frame},
		{"a length that lies", spineScript{On: map[string]string{"connect": "raw Content-Length: 3\r\n\r\n{}garbage"}}, nil, frame},
		{"not JSON", spineScript{On: map[string]string{"connect": "raw " + spineFrame("{'a':1}")}}, nil, frame},
		{"a result of another type", spineScript{On: map[string]string{"connect": "result 5"}}, nil, func(err error) bool { var e *ProtocolError; return errors.As(err, &e) }},
		{"an error of another type", spineScript{On: map[string]string{"connect": "error 5"}}, nil, func(err error) bool { var e *RPCError; return errors.As(err, &e) }},
		{"a refused token", spineScript{TCP: true, On: map[string]string{"connect": `error {"code":-32002,"message":"AUTHENTICATION_FAILED"}`}}, nil, is(ErrAuthentication)},
		{"exit", spineScript{On: map[string]string{"connect": "exit 9"}}, nil, func(err error) bool {
			var e *ExitError
			return errors.As(err, &e) && e.State.ExitCode() == 9
		}},
		{"exit in a frame", spineScript{Print: "Content-Length: 100\r\n\r\n{", On: map[string]string{"connect": "exit 9"}}, nil, func(err error) bool {
			var e *ExitError
			return errors.As(err, &e) && e.State.ExitCode() == 9
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			spineFlat(t)
			o := spineOptions(t, tt.script)
			if tt.change != nil {
				tt.change(o)
			}
			c, err := Start(testContext(t), o)
			if c != nil || err == nil || !tt.is(err) {
				t.Errorf("got %v", err)
			}
			if err != nil && (!strings.HasPrefix(err.Error(), "copilot: ") || strings.Count(err.Error(), "copilot: ") > 1) {
				t.Errorf("the package is not named once in %q", err)
			}
			if err != nil && strings.ContainsFunc(err.Error(), func(r rune) bool { return r < ' ' && r != '\n' }) {
				t.Errorf("control characters in %q", err)
			}
		})
	}
	t.Run("nobody listens", func(t *testing.T) {
		leakCheck(t)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		addr := l.Addr().String()
		l.Close()
		if _, err := Dial(testContext(t), addr, nil); !errors.Is(err, syscall.ECONNREFUSED) || !strings.Contains(err.Error(), addr) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("no stream", func(t *testing.T) {
		if _, err := NewClient(testContext(t), nil, nil); !errors.Is(err, ErrInvalidConfig) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("of another kind", func(t *testing.T) {
		leakCheck(t)
		near, far := net.Pipe()
		startPeer(t, far)
		if _, err := NewClient(testContext(t), near, &Options{GitHubToken: "t"}); !errors.Is(err, ErrInvalidConfig) {
			t.Errorf("got %v", err)
		}
	})
}

// ---- fuzzing ----

// readFrames reads r to its end and returns the bodies and the error.
func readFrames(r io.Reader, max int) (bodies [][]byte, err error) {
	fr := newFrameReader(r, max)
	for {
		body, err := fr.next()
		if err != nil {
			return bodies, err
		}
		bodies = append(bodies, body)
	}
}

func FuzzFrames(f *testing.F) {
	for _, s := range []string{
		"", "{}", "Content-Length: 2\r\n\r\n{}", "Content-Length: 2\n\n{}content-length:0\r\n\r\n",
		"Content-Length: 9223372036854775807\r\n\r\n", "Content-Length: 99999999\r\n\r\nx", "Content-Length: -1\r\n\r\n", "Content-Length: 1\r\nContent-Length: 1\r\n\r\n1",
		"\r\n\r\n", "\n", ":\r\n\r\n", "X\r\n", "X: \x00", spineFrame("😀") + "C",
	} {
		f.Add([]byte(s), int64(1))
	}
	f.Fuzz(func(t *testing.T, data []byte, seed int64) {
		const limit = 1 << 28
		var bodies [][]byte
		var err error
		allocated := spineAllocated(func() { bodies, err = readFrames(bytes.NewReader(data), limit) })
		if most := uint64(len(data)) + 1280<<10; len(data) < eagerBody && allocated > most {
			t.Errorf("%d bytes allocated for %d", allocated, len(data))
		}
		var broken *FrameError
		if errors.As(err, &broken) {
			if len(broken.Quote) > 256 {
				t.Errorf("%d bytes quoted", len(broken.Quote))
			}
		} else if err != io.EOF && err != io.ErrUnexpectedEOF {
			t.Errorf("got %v", err)
		}
		// However it arrives, it is the same stream.
		again, err2 := readFrames(&spineChunks{data, 1 + int(uint64(seed)%50), rand.New(rand.NewSource(seed))}, limit)
		if !slices.EqualFunc(bodies, again, bytes.Equal) || errors.As(err, &broken) != errors.As(err2, &broken) || !errors.As(err, &broken) && err != err2 {
			t.Errorf("%d bodies and %v at once, %d and %v in pieces", len(bodies), err, len(again), err2)
		}
		// What is framed comes back.
		framed := spineFrame(string(data)) + spineFrame("")
		if back, err := readFrames(&spineChunks{[]byte(framed), 100, rand.New(rand.NewSource(seed))}, limit); err != io.EOF || len(back) != 2 || !bytes.Equal(back[0], data) || len(back[1]) != 0 {
			t.Errorf("round trip: %d bodies, %v", len(back), err)
		}
	})
}

var spineMessages = []string{
	`{"jsonrpc":"2.0","id":1,"result":{"a":[1,2,{"b":null}]}}`, `{"id":"x","error":{"code":-1,"message":"no","data":"d"}}`,
	`{"method":"session.event","params":{"sessionId":"s","event":{"id":"e","type":"x","timestamp":"2026-01-02T03:04:05Z","parentId":null,"agentId":"a","ephemeral":true,"data":{"a":1}}}}`,
	`{"method":"session.event","params":{"event":5,"event":{"type":"session.idle"},"sessionId":"s"}}`,
	`{"method":"session.event","params":{"sessionId":"s","event":{"type":"assistant.message","data":{"content":"\ud83d\ude00"}}}}`,
	`{"method":"session.event","params":{"sessionId":"s","event":{"type":"session.error","data":{"errorType":"query"}}}}`,
	`{"method":"session.lifecycle","params":{"type":"session.deleted","sessionId":"s","metadata":{"startTime":"x"}}}`,
	`{"id":7,"method":"custom","params":[1]}`, `{"id":{"a":1},"method":"userInput.request","params":{"sessionId":"s","question":"?"}}`,
	`{"id":1,"method":"hooks.invoke","params":{"sessionId":"s","hookType":"preToolUse","input":{}}}`, `{"method":"$/cancelRequest","params":{"id":7}}`,
	`{"method":"custom","params":null}`, `{"id":null,"method":""}`, `{"id":3,"result":null}`, `{"\u0069d":4,"result":1}`, `[]`, `null`, `"x"`, ` 5 `, `{}`, ``, `{`, `{"a":1}x`, `{"a":01}`, `{"a":"` + "\x01" + `"}`,
	`{"a":"\ud800"}`, "{\"a\":\"\xff\"}", `{"a":1e999}`, `{"a":-}`, `{"a":tru}`, `{"a":1,}`, `{"a" 1}`, strings.Repeat("[", maxNesting) + strings.Repeat("]", maxNesting), strings.Repeat("[", maxNesting+1) + strings.Repeat("]", maxNesting+1),
	`{"params":` + strings.Repeat("[", maxNesting-1) + strings.Repeat("]", maxNesting-1) + `}`, `{"params":` + strings.Repeat("[", maxNesting) + strings.Repeat("]", maxNesting) + `}`,
	`{"params":{"event":{"data":` + strings.Repeat("[", maxNesting-3) + strings.Repeat("]", maxNesting-3) + `}}}`, `{"params":{"event":{"data":` + strings.Repeat("[", maxNesting-2) + strings.Repeat("]", maxNesting-2) + `}}}`,
}

func FuzzMessage(f *testing.F) {
	for _, s := range spineMessages {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		before := bytes.Clone(body)
		var m message
		if got, want := m.parse(body), json.Valid(body); got != want {
			t.Fatalf("valid: %v, encoding/json says %v", got, want)
		} else if !got {
			return
		}
		if !bytes.Equal(body, before) {
			t.Fatal("the body was changed")
		}
		members := func(raw []byte) (of map[string]json.RawMessage) {
			_ = json.Unmarshal(raw, &of) // nil for what is no object
			return of
		}
		check := func(what string, of map[string]json.RawMessage, got map[string][]byte) {
			for name, raw := range got {
				if string(of[name]) != string(raw) || (of[name] == nil) != (raw == nil) {
					t.Errorf("%s.%s: %q, encoding/json says %q", what, name, raw, of[name])
				}
			}
		}
		top := members(body)
		check("message", top, map[string][]byte{"id": m.id, "method": m.method, "params": m.params, "result": m.result, "error": m.err})
		params := members(m.params)
		check("params", params, map[string][]byte{"sessionId": m.sessionID, "event": m.event})
		e := &m.fields
		check("event", members(m.event), map[string][]byte{"id": e.id, "type": e.typ, "timestamp": e.timestamp, "parentId": e.parentID,
			"agentId": e.agentID, "ephemeral": e.ephemeral, "data": e.data})
		for name, want := range top {
			if got := member(body, name); string(got) != string(want) && !strings.ContainsRune(name, '\uFFFD') {
				t.Errorf("member %q: %q, encoding/json says %q", name, got, want)
			}
		}
		var text string
		if m.id != nil && m.id[0] == '"' && json.Unmarshal(m.id, &text) == nil && unquote(m.id) != text {
			t.Errorf("unquoted to %q, encoding/json says %q", unquote(m.id), text)
		}
		// What has been taken apart goes out as it came.
		if raw, err := marshal(json.RawMessage(m.params)); m.params != nil && (err != nil || !bytes.Equal(raw, m.params)) {
			t.Errorf("params %q went out as %q, %v", m.params, raw, err)
		}
		event := newEvent(e, make(eventTypes))
		event.Payload()
		if raw, err := json.Marshal(event); err != nil {
			t.Errorf("event does not marshal: %v", err)
		} else if err := event.UnmarshalJSON(raw); err != nil {
			t.Errorf("event does not come back from %s: %v", raw, err)
		}
	})
}

// spinePeer answers the first two requests, then sends what is given, then ends.
type spinePeer struct {
	answers chan []byte // one for each request that was written; closed with the last
	left    int
	rest    []byte // of what is being read
	stuff   []byte
	closed  chan struct{}
	once    sync.Once
}

func (p *spinePeer) Read(b []byte) (int, error) {
	for len(p.rest) == 0 {
		select {
		case rest, ok := <-p.answers:
			if !ok {
				return 0, io.EOF
			}
			p.rest = rest
		case <-p.closed:
			return 0, io.ErrClosedPipe
		}
	}
	n := copy(b, p.rest)
	p.rest = p.rest[n:]
	return n, nil
}

func (p *spinePeer) Write(b []byte) (int, error) {
	switch p.left--; p.left {
	case 1:
		p.answers <- []byte(spineFrame(`{"id":1,"result":{"protocolVersion":3}}`))
	case 0:
		p.answers <- append([]byte(spineFrame(`{"id":2,"result":{"sessionId":"s"}}`)), p.stuff...)
		close(p.answers)
	}
	return len(b), nil
}

func (p *spinePeer) Close() error {
	p.once.Do(func() { close(p.closed) })
	return nil
}

func FuzzDispatch(f *testing.F) {
	for i, s := range spineMessages {
		f.Add([]byte(s), []byte(spineMessages[(i+7)%len(spineMessages)]), []byte("Content-Length: 5\r\n\r\n{"))
	}
	f.Fuzz(func(t *testing.T, one, two, raw []byte) {
		before := runtime.NumGoroutine()
		custom := func(ctx context.Context, method string, params json.RawMessage) (any, error) { return params, nil }
		p := &spinePeer{answers: make(chan []byte, 2), left: 2, closed: make(chan struct{}),
			stuff: slices.Concat([]byte(spineFrame(string(one))), []byte(spineFrame(string(two))), raw)}
		c, err := NewClient(testContext(t), p, &Options{Handlers: map[string]HandlerFunc{"custom": custom}})
		if err != nil {
			t.Fatal(err)
		}
		prepared, err := c.PrepareSession(&SessionConfig{SessionID: "s", EventBuffer: 2, Hooks: &Hooks{}, OnPermission: ApproveAll})
		if err != nil {
			t.Fatal(err)
		}
		events, notices := prepared.Events(context.Background()), c.Lifecycle(context.Background())
		_, _ = prepared.Start(testContext(t)) // the end may overtake it
		await(t, "client's end", c.Done())
		if c.Err() == nil {
			t.Error("ended without a reason")
		}
		for e, err := range events {
			if err == nil {
				e.Payload()
			}
		}
		for range notices {
		}
		for deadline := time.Now().Add(patience); runtime.NumGoroutine() > before; runtime.Gosched() {
			if time.Now().After(deadline) {
				buf := make([]byte, 1<<16)
				t.Fatalf("goroutines left:\n%s", buf[:runtime.Stack(buf, true)])
			}
		}
	})
}

// TestCase064NoHiddenLimits lists every place that has a clock. None of them bounds what a caller waits for: a turn, a call, a handler.
func TestCase064NoHiddenLimits(t *testing.T) {
	known := map[string]string{
		"abandon":             "the kill of a start that failed",
		"Client.explain":      "the exit status behind the end of a stream",
		"Client.runStop":      "StopGrace, and what the stream leaves behind",
		"conn.writeLoop":      "the reader's better reason, once a write has failed",
		"turn.arm":            "doubt whether a message is still in the queue, see check",
		"turn.check":          "the question whether the server works, which is asked again",
		"exchange.finish":     "a notice to the server that nobody waits for",
		"process.own":         "descendants of a killed child",
		"process.awaitFamily": "the same",
		"process.awaitStderr": "the tail of a dead child's stderr",
		"process.end":         "StopGrace",
		"process.listenPort":  "the exit status of a child whose stdout has ended",
	}
	clocks := map[string]bool{"time.After": true, "time.AfterFunc": true, "time.NewTimer": true, "time.NewTicker": true, "time.Tick": true, "time.Sleep": true,
		"context.WithTimeout": true, "context.WithTimeoutCause": true, "context.WithDeadline": true, "context.WithDeadlineCause": true}
	files, err := filepath.Glob("*.go")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	found := 0
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			where := f.Name.Name
			if f.Recv != nil {
				of := f.Recv.List[0].Type
				if star, ok := of.(*ast.StarExpr); ok {
					of = star.X
				}
				if id, ok := of.(*ast.Ident); ok {
					where = id.Name + "." + where
				}
			}
			ast.Inspect(f, func(n ast.Node) bool {
				sel, ok := n.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				if pkg, ok := sel.X.(*ast.Ident); ok && clocks[pkg.Name+"."+sel.Sel.Name] {
					if found++; known[where] == "" {
						t.Errorf("%s: %s has a clock that no contract names", name, where)
					}
				}
				return true
			})
		}
	}
	if found == 0 {
		t.Error("found none at all")
	}
}
