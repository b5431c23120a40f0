package copilot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// A prepWay is one of the two ways to start a session.
type prepWay struct{ name, method string }

var prepWays = []prepWay{{"create", "session.create"}, {"resume", "session.resume"}}

// prepEachWay runs f for create and for resume, with a check for leaks.
func prepEachWay(t *testing.T, f func(t *testing.T, way prepWay)) {
	for _, way := range prepWays {
		t.Run(way.name, func(t *testing.T) {
			leakCheck(t)
			f(t, way)
		})
	}
}

// prepare prepares a session with this id; cfg must not name one.
func (w prepWay) prepare(t testing.TB, c *Client, id string, cfg SessionConfig) *PreparedSession {
	t.Helper()
	var p *PreparedSession
	var err error
	if w.name == "resume" {
		p, err = c.PrepareResumeSession(id, &cfg)
	} else {
		cfg.SessionID = id
		p, err = c.PrepareSession(&cfg)
	}
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// followUps is a configuration that needs both requests which complete a start.
func followUps() SessionConfig {
	return SessionConfig{
		OnMCPAuth:              func(context.Context, MCPAuthRequest) (*MCPAuthToken, error) { return nil, nil },
		SkipCustomInstructions: new(bool),
	}
}

// gatedConn holds writes back while its gate is closed.
type gatedConn struct {
	io.ReadWriteCloser
	entered chan struct{} // receives one value for each write that is held back
	mu      sync.Mutex
	gate    chan struct{} // nil is open
}

func (g *gatedConn) shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.gate = make(chan struct{})
}

func (g *gatedConn) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.gate != nil {
		close(g.gate)
		g.gate = nil
	}
}

func (g *gatedConn) Write(b []byte) (int, error) {
	g.mu.Lock()
	gate := g.gate
	g.mu.Unlock()
	if gate != nil {
		g.entered <- struct{}{}
		<-gate
	}
	return g.ReadWriteCloser.Write(b)
}

func (g *gatedConn) Close() error {
	g.open()
	return g.ReadWriteCloser.Close()
}

// A lateContext ends in two steps: Err tells first, Done follows. Between them is the moment in which a cancelled call has not noticed yet.
type lateContext struct {
	context.Context
	ended atomic.Bool
	done  chan struct{}
}

func (c *lateContext) Done() <-chan struct{} { return c.done }

func (c *lateContext) Err() error {
	if c.ended.Load() {
		return context.Canceled
	}
	return nil
}

// A startBed is a client over a gated connection to a scripted server that leaves starts unanswered.
type startBed struct {
	t    *testing.T
	way  prepWay
	c    *Client
	p    *peer
	gate *gatedConn
}

type reservedKey struct{}

func newStartBed(t *testing.T, way prepWay) *startBed {
	near, far := net.Pipe()
	b := &startBed{t: t, way: way, p: startPeer(t, far), gate: &gatedConn{ReadWriteCloser: near, entered: make(chan struct{}, 16)}}
	// The hook is asked between the reservation of the id and the write.
	hook := func(ctx context.Context) (string, string) {
		if f, ok := ctx.Value(reservedKey{}).(func()); ok {
			f()
		}
		return "", ""
	}
	c, err := NewClient(testContext(t), b.gate, &Options{TraceContext: hook})
	if err != nil {
		t.Fatal(err)
	}
	b.c = c
	t.Cleanup(func() {
		c.ForceStop()
		await(t, "client's end", c.Done())
	})
	for _, way := range prepWays {
		b.p.handle(way.method, func(*peer, peerMessage) any { return noAnswer })
	}
	return b
}

// An attempt is one start in progress.
type attempt struct {
	prepared *PreparedSession
	sub      *Subscription[Event]
	ctx      *lateContext
	reserved chan struct{} // closed when the id is its
	proceed  chan struct{} // what the attempt then waits for, if held was asked for
	result   <-chan error
	session  *Session
}

// begin starts a session. With held, it stops between the reservation and the write.
func (b *startBed) begin(id string, cfg SessionConfig, held bool) *attempt {
	a := b.ready(id, cfg)
	a.start(held)
	return a
}

func (b *startBed) ready(id string, cfg SessionConfig) *attempt {
	a := &attempt{prepared: b.way.prepare(b.t, b.c, id, cfg), reserved: make(chan struct{}), proceed: make(chan struct{})}
	a.sub = a.prepared.Subscribe()
	return a
}

func (a *attempt) start(held bool) {
	var once sync.Once
	hook := func() {
		once.Do(func() {
			close(a.reserved)
			if held {
				<-a.proceed
			}
		})
	}
	a.ctx = &lateContext{Context: context.WithValue(context.Background(), reservedKey{}, hook), done: make(chan struct{})}
	a.result = async(func() (err error) {
		a.session, err = a.prepared.Start(a.ctx)
		return err
	})
}

// accept answers the n-th start of a method.
func (b *startBed) accept(n int, id string) {
	b.p.answer(b.p.wait(b.way.method, n).ID, map[string]any{"sessionId": id})
}

// owner returns who has an id.
func (b *startBed) owner(id string) *Session {
	b.c.mu.Lock()
	defer b.c.mu.Unlock()
	return b.c.routes[id].session
}

// until polls for what nothing signals.
func until(t testing.TB, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !done(); runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not after %v", what, patience)
		}
	}
}

// released returns the releases of a method that the server has seen, once all that were begun are answered.
func released(t testing.TB, c *Client, p *peer, method string) []string {
	t.Helper()
	p.sync()
	for {
		var r *release
		c.mu.Lock()
		for _, r = range c.releases {
			break
		}
		c.mu.Unlock()
		if r == nil {
			break
		}
		await(t, "release", r.done)
	}
	var ids []string
	for _, m := range p.calls(method) {
		id, _ := m.get("sessionId").(string)
		ids = append(ids, id)
	}
	return ids
}

// expectDestroyed compares the ids of all session.destroy so far.
func (b *startBed) expectDestroyed(what string, want ...string) {
	b.t.Helper()
	if got := released(b.t, b.c, b.p, "session.destroy"); !slices.Equal(got, want) {
		b.t.Fatalf("%s: destroyed %q, want %q", what, got, want)
	}
}

// expectRoutes checks that nothing but these ids is registered.
func expectRoutes(t testing.TB, c *Client, want ...string) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	got := make([]string, 0, len(c.routes))
	for id := range c.routes {
		got = append(got, id)
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("registered: %q, want %q", got, want)
	}
}

// expectEnd checks that a subscription has no event left and ends with want, io.EOF for a clean end.
func expectEnd(t testing.TB, sub *Subscription[Event], want error) {
	t.Helper()
	if e, err := sub.Next(testContext(t)); !errors.Is(err, want) || err == nil {
		t.Errorf("subscription: got %v %v, want %v", e.Type, err, want)
	}
}

// expectFailure checks a start's error: its cause, and that it says which session it was without showing it.
func expectFailure(t testing.TB, err error, id string, want error) {
	t.Helper()
	var s *SessionError
	if !errors.Is(err, want) || !errors.As(err, &s) || s.SessionID != id {
		t.Errorf("got %v, want a SessionError of %s around %v", err, id, want)
	}
}

func TestPrepareIsInert(t *testing.T) {
	prepEachWay(t, func(t *testing.T, way prepWay) {
		c, p := newPeer(t, nil)
		p.sync()
		before := runtime.NumGoroutine()
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		for i := 0; i < 100; i++ {
			cfg := followUps()
			prepared := way.prepare(t, c, fmt.Sprint("s", i), cfg)
			prepared.Subscribe()
			prepared.Events(ctx)
			if got := prepared.SessionID(); got != fmt.Sprint("s", i) {
				t.Errorf("id %q", got)
			}
		}
		if after := runtime.NumGoroutine(); after > before {
			t.Errorf("%d goroutines, %d before", after, before)
		}
		expectRoutes(t, c)
		p.sync()
		if got := p.calls(""); len(got) != 1 {
			t.Errorf("%d requests, want connect alone", len(got))
		}
	})
	c, _ := newPeer(t, nil)
	if p, err := c.PrepareSession(nil); err != nil || len(p.SessionID()) != 36 || p.SessionID()[14] != '4' {
		t.Errorf("nil configuration: %v", err)
	}
	if p, err := c.PrepareSession(&SessionConfig{Cloud: &CloudOptions{}}); err != nil || p.SessionID() != "" {
		t.Errorf("cloud: %v", err)
	}
	for name, err := range map[string]error{
		"no id":        second(c.PrepareResumeSession("", nil)),
		"another id":   second(c.PrepareResumeSession("a", &SessionConfig{SessionID: "b"})),
		"create only":  second(c.PrepareResumeSession("a", &SessionConfig{Name: "x"})),
		"resume only":  second(c.PrepareSession(&SessionConfig{ContinuePendingWork: true})),
		"ring":         second(c.PrepareSession(&SessionConfig{EventBuffer: -1})),
		"create start": second(c.CreateSession(context.Background(), &SessionConfig{EventBuffer: -1})),
		"resume start": second(c.ResumeSession(context.Background(), "", nil)),
	} {
		if !errors.Is(err, ErrInvalidConfig) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

func TestPreparedClose(t *testing.T) {
	prepEachWay(t, func(t *testing.T, way prepWay) {
		c, p := newPeer(t, nil)
		prepared := way.prepare(t, c, "s", SessionConfig{})
		sub := prepared.Subscribe()
		for range 2 {
			if err := prepared.Close(); err != nil {
				t.Fatal(err)
			}
		}
		expectEnd(t, sub, io.EOF)
		for range prepared.Events(testContext(t)) {
			t.Error("a pair after Close")
		}
		if _, err := prepared.Start(testContext(t)); !errors.Is(err, ErrClosed) {
			t.Errorf("start: %v", err)
		}
		expectRoutes(t, c)
		if p.calls(way.method) != nil {
			t.Error("written after Close")
		}

		prepared = way.prepare(t, c, "s", SessionConfig{})
		sub = prepared.Subscribe()
		s, err := prepared.Start(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		_ = prepared.Close() // too late: nothing happens
		p.emit("s", "x", nil)
		next(t, sub)
		if s.Context().Err() != nil {
			t.Error("Close ended the session")
		}
	})
}

func TestStartOnce(t *testing.T) {
	prepEachWay(t, func(t *testing.T, way prepWay) {
		b := newStartBed(t, way)
		a := b.begin("s", SessionConfig{}, false)
		b.p.wait(way.method, 1)
		again := func(when string) {
			t.Helper()
			if _, err := a.prepared.Start(testContext(t)); !errors.Is(err, ErrAlreadyStarted) {
				t.Errorf("%s: %v", when, err)
			}
		}
		again("in flight")
		b.accept(1, "s")
		if err := await(t, "start", a.result); err != nil {
			t.Fatal(err)
		}
		again("open")
		b.p.emit("s", "x", nil)
		next(t, a.sub)

		b.p.refuse(way.method, -32603, "no")
		a = b.begin("other", SessionConfig{}, false)
		if err := await(t, "start", a.result); err == nil {
			t.Fatal("not refused")
		}
		again("after a failure")
		if n := len(b.p.calls(way.method)); n != 2 {
			t.Errorf("%d requests", n)
		}
	})
}

// TestStartRefusesOpenID tries an id that is starting, open, watched and leaving.
func TestStartRefusesOpenID(t *testing.T) {
	prepEachWay(t, func(t *testing.T, way prepWay) {
		b := newStartBed(t, way)
		refused := func(when, id string) {
			t.Helper()
			written := len(b.p.calls(""))
			a := b.begin(id, SessionConfig{}, false)
			expectFailure(t, await(t, when, a.result), id, ErrSessionOpen)
			expectEnd(t, a.sub, ErrSessionOpen)
			if _, err := a.prepared.Start(testContext(t)); !errors.Is(err, ErrAlreadyStarted) {
				t.Errorf("%s: the attempt did not use it up: %v", when, err)
			}
			if n := len(b.p.calls("")); n != written {
				t.Errorf("%s: something was written", when)
			}
		}
		a := b.begin("s", SessionConfig{}, false)
		b.p.wait(way.method, 1)
		refused("starting", "s")
		b.accept(1, "s")
		if err := await(t, "start", a.result); err != nil {
			t.Fatal(err)
		}
		refused("open", "s")
		done, cancel := context.WithCancel(context.Background())
		cancel() // a ctx that is done is told before anything else
		expectFailure(t, second(way.prepare(t, b.c, "s", SessionConfig{}).Start(done)), "s", context.Canceled)

		b.p.handle("sessions.watch", func(*peer, peerMessage) any { return map[string]any{"sessionId": "w", "readOnly": true} })
		if _, err := b.c.WatchSharedSession(testContext(t), "w", nil); err != nil {
			t.Fatal(err)
		}
		refused("watched", "w")

		b.p.handle("session.destroy", func(*peer, peerMessage) any { return noAnswer })
		gone := async(func() error { return a.session.Disconnect(testContext(t)) })
		destroy := b.p.wait("session.destroy", 1)
		refused("leaving", "s")
		b.p.answer(destroy.ID, map[string]any{"success": false}) // gone before: released all the same
		if err := await(t, "disconnect", gone); err != nil {
			t.Fatal(err)
		}
		a = b.begin("s", SessionConfig{}, false)
		b.accept(2, "s")
		if err := await(t, "start again", a.result); err != nil {
			t.Fatal(err)
		}
	})
}

// A cancellation is a start that is cancelled at one point, and what follows.
type cancellation struct {
	point string // where it is cancelled
	retry string // when the same id is started again: "no", "early" before the cancelled attempt has returned, "late" after
	late  string // when the server accepts the cancelled request after all: "never", "before" the retry, "during" it, when it is "open", "refused", "leaving", "gone"
}

func (x cancellation) String() string { return x.point + "," + x.retry + "," + x.late }

// TestCancelledStart cancels starts wherever they can wait. The cancelled one must return its ctx's error, leave nothing registered, and
// whatever the server made of it must be released, unless a retry has it.
func TestCancelledStart(t *testing.T) {
	var all []cancellation
	for _, point := range []string{"before", "release", "reserved", "writer", "interest", "update"} {
		all = append(all, cancellation{point, "no", "never"}, cancellation{point, "late", "never"})
		if point != "before" {
			all = append(all, cancellation{point, "early", "never"})
		}
	}
	for _, point := range []string{"taken", "unanswered"} {
		all = append(all, cancellation{point, "no", "never"}, cancellation{point, "no", "during"}, cancellation{point, "late", "before"})
		for _, retry := range []string{"early", "late"} {
			for _, late := range []string{"never", "during", "open", "refused", "leaving", "gone"} {
				all = append(all, cancellation{point, retry, late})
			}
		}
	}
	prepEachWay(t, func(t *testing.T, way prepWay) {
		for _, x := range all {
			t.Run(x.String(), func(t *testing.T) { x.run(t, way) })
		}
	})
}

func (x cancellation) run(t *testing.T, way prepWay) {
	leakCheck(t)
	const id = "the-session"
	b := newStartBed(t, way)
	var destroyed []string // what the server must have been told
	starts := 0            // written so far

	var previous peerMessage // the release that is awaited
	if x.point == "release" {
		s := b.begin(id, SessionConfig{}, false)
		starts++
		b.accept(starts, id)
		if err := await(t, "first start", s.result); err != nil {
			t.Fatal(err)
		}
		b.p.handle("session.destroy", func(*peer, peerMessage) any { return noAnswer })
		ctx, cancel := context.WithCancel(context.Background())
		left := async(func() error { return s.session.Disconnect(ctx) })
		previous = b.p.wait("session.destroy", 1)
		cancel()
		expectFailure(t, await(t, "disconnect", left), id, context.Canceled)
		b.p.handle("session.destroy", func(*peer, peerMessage) any { return map[string]any{"success": true} })
		destroyed = append(destroyed, id)
	}

	// The attempt that is cancelled.
	a := b.ready(id, followUps())
	hold := func(method string) {
		b.p.handle(method, func(*peer, peerMessage) any { return noAnswer })
	}
	switch x.point {
	case "before":
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		a.ctx = &lateContext{Context: ctx, done: make(chan struct{})}
		a.ctx.ended.Store(true)
		a.result = async(func() error { return second(a.prepared.Start(ctx)) })
	case "release":
		a.start(false)
		until(t, "reservation", func() bool { return b.owner(id) == a.prepared.session })
	case "reserved":
		a.start(true)
		await(t, "reservation", a.reserved)
	case "writer", "taken":
		b.gate.shut()
		if x.point == "writer" { // something else is on the way out
			filler, err := newFrame([]byte(`{"jsonrpc":"2.0","method":"filler","params":`), struct{}{})
			if err != nil {
				t.Fatal(err)
			}
			if err := b.c.conn.send(testContext(t), nil, filler); err != nil {
				t.Fatal(err)
			}
			await(t, "write", b.gate.entered)
		}
		a.start(false)
		await(t, "reservation", a.reserved)
		if x.point == "taken" {
			starts++
			await(t, "write", b.gate.entered)
		}
	case "unanswered":
		a.start(false)
		starts++
		b.p.wait(way.method, starts)
	case "interest", "update":
		method := "session.eventLog.registerInterest"
		if x.point == "update" {
			method = "session.options.update"
		}
		hold(method)
		a.start(false)
		starts++
		b.accept(starts, id)
		b.p.wait(method, 1)
		b.p.handle(method, func(*peer, peerMessage) any { return map[string]any{} })
	}
	mine := starts // the number of its request, where it was written

	// The cancellation, and the retry.
	a.ctx.ended.Store(true)
	var retry *attempt
	if x.retry == "early" {
		retry = b.begin(id, SessionConfig{}, false)
		if x.point == "release" {
			until(t, "takeover", func() bool { return b.owner(id) == retry.prepared.session })
		} else {
			await(t, "takeover", retry.reserved)
		}
	}
	close(a.ctx.done)
	close(a.proceed)
	expectFailure(t, await(t, "cancelled start", a.result), id, context.Canceled)
	expectEnd(t, a.sub, context.Canceled)
	if x.retry == "no" {
		expectRoutes(t, b.c)
	}
	if x.retry == "late" && x.late != "before" {
		retry = b.begin(id, SessionConfig{}, false)
	}
	b.gate.open()
	if x.point == "release" {
		b.p.answer(previous.ID, map[string]any{"success": true})
	}
	switch {
	case x.point != "interest" && x.point != "update": // nothing on the server yet
	case x.retry == "early": // it is the retry's
	default:
		destroyed = append(destroyed, id)
	}
	lateAnswer := func() {
		b.accept(mine, id)
		b.p.sync()
	}
	switch {
	case x.retry == "no":
		if x.late == "during" {
			lateAnswer()
			destroyed = append(destroyed, id)
		}
		b.expectDestroyed("at the end", destroyed...)
		expectRoutes(t, b.c)
		return
	case x.late == "before":
		lateAnswer()
		destroyed = append(destroyed, id)
		retry = b.begin(id, SessionConfig{}, false)
	}

	// The retry's own way. Its events are its own from the first.
	starts++
	b.p.wait(way.method, starts)
	if n := len(b.p.calls(way.method)); n != starts {
		t.Errorf("%d starts were written, want %d", n, starts)
	}
	b.p.emit(id, "early", nil)
	if e := next(t, retry.sub); e.Type != "early" {
		t.Errorf("got %v", e.Type)
	}
	if x.late == "during" {
		lateAnswer()
	}
	if x.late == "refused" {
		b.p.answer(b.p.wait(way.method, starts).ID, &peerError{Code: -32603, Message: "no"})
		var refusal *RPCError
		if err := await(t, "retry", retry.result); !errors.As(err, &refusal) {
			t.Errorf("retry: %v", err)
		}
		b.expectDestroyed("refused", destroyed...)
		lateAnswer()
		b.expectDestroyed("late after a refusal", append(destroyed, id)...)
		expectRoutes(t, b.c)
		return
	}
	b.accept(starts, id)
	if err := await(t, "retry", retry.result); err != nil {
		t.Fatalf("retry: %v", err)
	}
	if x.late == "open" {
		lateAnswer()
	}
	b.expectDestroyed("while the retry is open", destroyed...)
	expectRoutes(t, b.c, id)
	b.p.emit(id, "live", nil)
	if e := next(t, retry.sub); e.Type != "live" {
		t.Errorf("got %v", e.Type)
	}
	if x.late == "leaving" {
		hold("session.destroy")
	}
	left := async(func() error { return retry.session.Disconnect(testContext(t)) })
	destroyed = append(destroyed, id)
	if x.late == "leaving" { // the server may have destroyed before it created
		request := b.p.wait("session.destroy", len(destroyed))
		lateAnswer()
		b.p.handle("session.destroy", func(*peer, peerMessage) any { return map[string]any{"success": true} })
		b.p.answer(request.ID, map[string]any{"success": true})
		destroyed = append(destroyed, id)
	}
	if err := await(t, "disconnect", left); err != nil {
		t.Error(err)
	}
	if x.late == "gone" {
		lateAnswer()
		destroyed = append(destroyed, id)
	}
	b.expectDestroyed("at the end", destroyed...)
	expectRoutes(t, b.c)
	expectEnd(t, retry.sub, io.EOF)
}

// TestAbandonedStartThatSucceeds answers a start whose ctx has ended and whose id was started again, before it has noticed the first.
func TestAbandonedStartThatSucceeds(t *testing.T) {
	prepEachWay(t, func(t *testing.T, way prepWay) {
		b := newStartBed(t, way)
		a := b.begin("s", SessionConfig{}, false)
		b.p.wait(way.method, 1)
		a.ctx.ended.Store(true)
		retry := b.begin("s", SessionConfig{}, false)
		b.p.wait(way.method, 2)
		b.accept(1, "s")
		b.p.sync()
		close(a.ctx.done)
		expectFailure(t, await(t, "abandoned", a.result), "s", context.Canceled)
		b.p.answer(b.p.wait(way.method, 2).ID, &peerError{Code: -32603, Message: "no"})
		var refusal *RPCError
		if err := await(t, "retry", retry.result); !errors.As(err, &refusal) {
			t.Errorf("retry: %v", err)
		}
		b.expectDestroyed("what the first made, once", "s")
		expectRoutes(t, b.c)
	})
}

// TestHandedOverSession has a start fail that took its id over from one that the server had accepted: it releases the session, alone.
func TestHandedOverSession(t *testing.T) {
	prepEachWay(t, func(t *testing.T, way prepWay) {
		b := newStartBed(t, way)
		b.p.handle("session.options.update", func(*peer, peerMessage) any { return noAnswer })
		a := b.begin("s", followUps(), false)
		b.accept(1, "s")
		b.p.wait("session.options.update", 1)
		a.ctx.ended.Store(true)
		retry := b.begin("s", SessionConfig{}, false)
		b.p.answer(b.p.wait(way.method, 2).ID, &peerError{Code: -32603, Message: "no"})
		var refusal *RPCError
		if err := await(t, "retry", retry.result); !errors.As(err, &refusal) {
			t.Errorf("retry: %v", err)
		}
		b.expectDestroyed("by the retry", "s")
		close(a.ctx.done)
		expectFailure(t, await(t, "abandoned", a.result), "s", context.Canceled)
		b.expectDestroyed("and by nobody else", "s")
	})
}

// TestLateMismatch answers a cancelled start with another id, which then is what must be released.
func TestLateMismatch(t *testing.T) {
	prepEachWay(t, func(t *testing.T, way prepWay) {
		b := newStartBed(t, way)
		a := b.begin("s", SessionConfig{}, false)
		b.p.wait(way.method, 1)
		a.ctx.ended.Store(true)
		close(a.ctx.done)
		expectFailure(t, await(t, "start", a.result), "s", context.Canceled)
		b.accept(1, "other")
		b.expectDestroyed("the stray", "other")
	})
}

// TestStartAnswers are answers that cannot be taken, and requests that are refused.
func TestStartAnswers(t *testing.T) {
	var (
		decoding *json.UnmarshalTypeError
		refusal  *RPCError
		mismatch *SessionIDMismatchError
	)
	as := func(target any) func(error) bool { return func(err error) bool { return errors.As(err, target) } }
	is := func(target error) func(error) bool {
		return func(err error) bool { return errors.As(err, &refusal) && errors.Is(err, target) }
	}
	only := func(want error) func(error) bool {
		return func(err error) bool {
			for _, kind := range []error{ErrSessionNotFound, ErrCannotResume, ErrAuthentication, ErrNotSupported} {
				if errors.Is(err, kind) != (kind == want) {
					return false
				}
			}
			return is(want)(err)
		}
	}
	for _, test := range []struct {
		name      string
		ways      string // "" is both
		answer    any
		check     func(error) bool
		destroyed []string
	}{
		{"number", "", 5, as(&decoding), []string{"s"}},
		{"list", "", []int{}, as(&decoding), []string{"s"}},
		{"id of a wrong type", "", map[string]any{"sessionId": 5}, func(err error) bool { return err != nil }, []string{"s"}},
		{"bad member", "", map[string]any{"sessionId": "s", "workspacePath": 5}, as(&decoding), []string{"s"}},
		{"no id", "create", map[string]any{}, func(err error) bool { return err != nil }, []string{"s"}},
		{"other case", "create", map[string]any{"SessionID": "s"}, func(err error) bool { return err != nil }, []string{"s"}},
		{"null", "create", nil, func(err error) bool { return err != nil }, []string{"s"}},
		{"another id", "", map[string]any{"sessionId": "stray"}, as(&mismatch), []string{"stray"}},
		{"an id that is open here", "", map[string]any{"sessionId": "open"}, as(&mismatch), nil},
		{"not found", "resume", &peerError{Code: -32603, Message: "Failed to load session events: Session not found: s"}, only(ErrSessionNotFound), nil},
		{"Case092 damaged", "resume", &peerError{Code: -32603, Message: "Session file is corrupted (line 7: unknown event)"}, only(ErrCannotResume), nil},
		{"Case084 authentication", "", &peerError{Code: -32603, Message: "Not authenticated. Please authenticate first."}, only(ErrAuthentication), nil},
		{"bad token", "", &peerError{Code: -32002, Message: "bad token"}, only(ErrAuthentication), nil},
		{"unknown method", "", &peerError{Code: -32601, Message: "Unhandled method"}, only(ErrNotSupported), nil},
	} {
		for _, way := range prepWays {
			if test.ways != "" && test.ways != way.name {
				continue
			}
			t.Run(test.name+" "+way.name, func(t *testing.T) {
				leakCheck(t)
				b := newStartBed(t, way)
				other := b.begin("open", SessionConfig{}, false)
				b.accept(1, "open")
				if err := await(t, "start", other.result); err != nil {
					t.Fatal(err)
				}
				a := b.begin("s", followUps(), false)
				b.p.answer(b.p.wait(way.method, 2).ID, test.answer)
				err := await(t, "start", a.result)
				if !test.check(err) {
					t.Errorf("got %v", err)
				}
				var s *SessionError
				if !errors.As(err, &s) || s.SessionID != "s" {
					t.Errorf("not a SessionError of it: %v", err)
				}
				if e, ok := test.answer.(*peerError); ok && (!errors.As(err, &refusal) || refusal.Code != e.Code || refusal.Message != e.Message || refusal.Method != way.method) {
					t.Errorf("not the server's words: %#v", err)
				}
				if errors.As(err, &mismatch) && (mismatch.Requested != "s" || mismatch.Returned != test.answer.(map[string]any)["sessionId"]) {
					t.Errorf("%+v", mismatch)
				}
				if _, last := a.sub.Next(testContext(t)); last == nil || !test.check(last) {
					t.Errorf("subscription: %v", last)
				}
				b.expectDestroyed("after it", test.destroyed...)
				expectRoutes(t, b.c, "open")
				if n := len(b.p.calls("session.options.update")) + len(b.p.calls("session.eventLog.registerInterest")); n != 0 {
					t.Errorf("%d requests after the failure", n)
				}
				b.p.emit("open", "x", nil)
				next(t, other.sub)

				a = b.begin("s", SessionConfig{}, false) // at once
				b.accept(3, "s")
				if err := await(t, "the same id again", a.result); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// TestResumeAnswerWithoutID is how old servers answer.
func TestResumeAnswerWithoutID(t *testing.T) {
	c, p := newPeer(t, nil)
	p.handle("session.resume", func(*peer, peerMessage) any { return map[string]any{"workspacePath": "/w"} })
	s, err := c.ResumeSession(testContext(t), "s", nil)
	if err != nil || s.ID() != "s" || s.WorkspacePath() != "/w" {
		t.Errorf("got %+v %v", s, err)
	}
}

func TestStartFollowUps(t *testing.T) {
	const interest, update = "session.eventLog.registerInterest", "session.options.update"
	prepEachWay(t, func(t *testing.T, way prepWay) {
		for _, test := range []struct {
			name, fails string
			mode        ClientMode
			cfg         SessionConfig
			want        []string
		}{
			{"none", "", ModeCLI, SessionConfig{}, nil},
			{"both", "", ModeCLI, followUps(), []string{interest, update}},
			{"interest", "", ModeCLI, SessionConfig{OnMCPAuth: followUps().OnMCPAuth}, []string{interest}},
			{"update", "", ModeCLI, SessionConfig{CoauthorEnabled: new(bool)}, []string{update}},
			{"empty mode", "", ModeEmpty, SessionConfig{AvailableTools: []string{}}, []string{update}},
			{"first fails", interest, ModeCLI, followUps(), []string{interest, "session.destroy"}},
			{"second fails", update, ModeCLI, followUps(), []string{interest, update, "session.destroy"}},
		} {
			c, p := newPeer(t, &Options{Mode: test.mode})
			if test.fails != "" {
				p.refuse(test.fails, -32099, "no such luck")
			}
			prepared := way.prepare(t, c, "s", test.cfg)
			sub := prepared.Subscribe()
			_, err := prepared.Start(testContext(t))
			released(t, c, p, "session.destroy")
			var got []string
			for _, m := range p.calls("") {
				got = append(got, m.Method)
				if m.Method != "connect" && m.get("sessionId") != "s" {
					t.Errorf("%s: %s names %v", test.name, m.Method, m.get("sessionId"))
				}
			}
			if want := append([]string{"connect", way.method}, test.want...); !slices.Equal(got, want) {
				t.Errorf("%s: requests %q, want %q", test.name, got, want)
			}
			var refusal *RPCError
			switch {
			case test.fails == "" && err != nil:
				t.Errorf("%s: %v", test.name, err)
			case test.fails != "":
				if !errors.As(err, &refusal) || refusal.Method != test.fails || refusal.Code != -32099 {
					t.Errorf("%s: %v", test.name, err)
				}
				expectEnd(t, sub, refusal)
				expectRoutes(t, c)
			}
		}
	})
}

// TestOneStartPath compares the requests of the short forms with those of the long ones.
func TestOneStartPath(t *testing.T) {
	for _, way := range prepWays {
		requests := func(start func(c *Client, cfg SessionConfig) error) (got []string) {
			c, p := newPeer(t, nil)
			if err := start(c, followUps()); err != nil {
				t.Fatal(err)
			}
			for _, m := range p.calls("") {
				got = append(got, m.Method+string(m.Params))
			}
			return got
		}
		long := requests(func(c *Client, cfg SessionConfig) error {
			return second(way.prepare(t, c, "s", cfg).Start(testContext(t)))
		})
		short := requests(func(c *Client, cfg SessionConfig) error {
			if way.name == "resume" {
				return second(c.ResumeSession(testContext(t), "s", &cfg))
			}
			cfg.SessionID = "s"
			return second(c.CreateSession(testContext(t), &cfg))
		})
		if !slices.Equal(long, short) || len(long) != 4 {
			t.Errorf("%s:\n%q\n%q", way.name, long, short)
		}
	}
}

// TestStartCtxBoundsTheStart cancels a start's ctx once it has returned.
func TestStartCtxBoundsTheStart(t *testing.T) {
	prepEachWay(t, func(t *testing.T, way prepWay) {
		c, p := newPeer(t, nil)
		ctx, cancel := context.WithCancel(context.Background())
		prepared := way.prepare(t, c, "s", SessionConfig{})
		sub := prepared.Subscribe()
		s, err := prepared.Start(ctx)
		cancel()
		if err != nil || s.Context().Err() != nil {
			t.Fatal(err)
		}
		p.emit("s", "x", nil)
		next(t, sub)
		if _, err := s.Send(testContext(t), Message{Prompt: "x"}); err != nil {
			t.Error(err)
		}
	})
}

// assign starts a session whose id the server will choose, up to the request.
func (b *startBed) assign(cfg SessionConfig) *attempt {
	cfg.Cloud = &CloudOptions{}
	a := b.begin("", cfg, false)
	if m := b.p.wait("session.create", 1); m.get("sessionId") != nil {
		b.t.Errorf("an id was sent: %v", m.get("sessionId"))
	}
	return a
}

func TestAssignedID(t *testing.T) {
	create := prepWays[0]
	t.Run("first events", func(t *testing.T) {
		leakCheck(t)
		b := newStartBed(t, create)
		a := b.assign(SessionConfig{})
		request := b.p.wait("session.create", 1)
		expectRoutes(t, b.c)
		b.p.send(
			b.p.event("cloud", "too early", nil),
			map[string]any{"jsonrpc": "2.0", "id": request.ID, "result": map[string]any{"sessionId": "cloud"}},
			b.p.event("cloud", "session.start", nil))
		if err := await(t, "start", a.result); err != nil {
			t.Fatal(err)
		}
		if e := next(t, a.sub); e.Type != "session.start" {
			t.Errorf("first is %v", e.Type)
		}
		if a.session.ID() != "cloud" || a.prepared.SessionID() != "" {
			t.Errorf("ids %q %q", a.session.ID(), a.prepared.SessionID())
		}
		expectRoutes(t, b.c, "cloud")
		if err := a.session.Disconnect(testContext(t)); err != nil {
			t.Error(err)
		}
		b.expectDestroyed("disconnect", "cloud")
	})
	t.Run("cancelled", func(t *testing.T) {
		leakCheck(t)
		b := newStartBed(t, create)
		a := b.assign(SessionConfig{})
		b.p.wait("session.create", 1)
		a.ctx.ended.Store(true)
		close(a.ctx.done)
		expectFailure(t, await(t, "start", a.result), "", context.Canceled)
		expectEnd(t, a.sub, context.Canceled)
		b.accept(1, "cloud")
		b.expectDestroyed("late answer", "cloud")
		expectRoutes(t, b.c)
	})
	t.Run("cancelled after the answer", func(t *testing.T) {
		leakCheck(t)
		b := newStartBed(t, create)
		b.p.handle("session.options.update", func(*peer, peerMessage) any { return noAnswer })
		a := b.assign(followUps())
		b.accept(1, "cloud")
		b.p.wait("session.options.update", 1)
		a.ctx.ended.Store(true)
		close(a.ctx.done)
		expectFailure(t, await(t, "start", a.result), "cloud", context.Canceled)
		b.expectDestroyed("at once", "cloud")
		expectRoutes(t, b.c)
	})
	t.Run("follow-up fails", func(t *testing.T) {
		leakCheck(t)
		b := newStartBed(t, create)
		b.p.refuse("session.options.update", -32099, "no")
		a := b.assign(followUps())
		b.accept(1, "cloud")
		var refusal *RPCError
		err := await(t, "start", a.result)
		if !errors.As(err, &refusal) {
			t.Fatal(err)
		}
		expectFailure(t, err, "cloud", refusal)
		b.expectDestroyed("at once", "cloud")
		expectRoutes(t, b.c)
	})
	t.Run("open here", func(t *testing.T) {
		leakCheck(t)
		b := newStartBed(t, create)
		other := b.begin("mine", SessionConfig{}, false)
		b.accept(1, "mine")
		if err := await(t, "start", other.result); err != nil {
			t.Fatal(err)
		}
		a := b.begin("", SessionConfig{Cloud: &CloudOptions{}}, false)
		b.accept(2, "mine")
		expectFailure(t, await(t, "start", a.result), "", ErrSessionOpen)
		b.expectDestroyed("nothing")
		expectRoutes(t, b.c, "mine")
		b.p.emit("mine", "x", nil)
		next(t, other.sub)
	})
	t.Run("no id", func(t *testing.T) {
		leakCheck(t)
		b := newStartBed(t, create)
		a := b.begin("", SessionConfig{Cloud: &CloudOptions{}}, false)
		b.p.answer(b.p.wait("session.create", 1).ID, map[string]any{})
		if err := await(t, "start", a.result); err == nil {
			t.Error("accepted")
		}
		b.expectDestroyed("nothing")
		expectRoutes(t, b.c)
	})
}

// TestStartMeetsTheEnd ends the client in every way while a start waits, at every place.
func TestStartMeetsTheEnd(t *testing.T) {
	ends := map[string]func(b *startBed) error{
		"Stop": func(b *startBed) error { return b.c.Stop(testContext(b.t)) },
		"ForceStop": func(b *startBed) error {
			b.c.ForceStop()
			return nil
		},
		"loss": func(b *startBed) error { return b.p.conn.Close() },
	}
	prepEachWay(t, func(t *testing.T, way prepWay) {
		for name, end := range ends {
			for _, point := range []string{"release", "reserved", "writer", "unanswered", "assigned", "interest", "update"} {
				if point == "assigned" && way.name == "resume" || point == "writer" && name == "loss" {
					continue
				}
				t.Run(name+","+point, func(t *testing.T) {
					leakCheck(t)
					b := newStartBed(t, way)
					b.c.opts.StopGrace = patience
					var a *attempt
					id, destroyed := "s", []string(nil)
					hold := func(method string) {
						b.p.handle(method, func(*peer, peerMessage) any { return noAnswer })
					}
					ended := func() <-chan error { return async(func() error { return end(b) }) }
					var over <-chan error
					switch point {
					case "release":
						first := b.begin("s", SessionConfig{}, false)
						b.accept(1, "s")
						if err := await(t, "start", first.result); err != nil {
							t.Fatal(err)
						}
						hold("session.destroy")
						ctx, cancel := context.WithCancel(context.Background())
						left := async(func() error { return first.session.Disconnect(ctx) })
						destroy := b.p.wait("session.destroy", 1)
						destroyed = append(destroyed, "s")
						cancel()
						await(t, "disconnect", left)
						a = b.begin("s", SessionConfig{}, false)
						until(t, "reservation", func() bool { return b.owner("s") == a.prepared.session })
						over = ended()
						if name == "Stop" {
							until(t, "stop", func() bool { return b.owner("s") == nil })
							b.p.answer(destroy.ID, map[string]any{"success": true})
						}
					case "reserved":
						a = b.begin("s", SessionConfig{}, true)
						await(t, "reservation", a.reserved)
						over = ended()
						await(t, "the session's end", a.prepared.session.ctx.Done())
						close(a.proceed)
					case "writer":
						b.gate.shut()
						filler, _ := newFrame([]byte(`{"jsonrpc":"2.0","method":"filler","params":`), struct{}{})
						if err := b.c.conn.send(testContext(t), nil, filler); err != nil {
							t.Fatal(err)
						}
						await(t, "write", b.gate.entered)
						a = b.begin("s", SessionConfig{}, false)
						await(t, "reservation", a.reserved)
						over = ended()
						await(t, "the session's end", a.prepared.session.ctx.Done())
						b.gate.open()
					case "unanswered":
						a = b.begin("s", SessionConfig{}, false)
						b.p.wait(way.method, 1)
						over = ended()
					case "assigned":
						id = ""
						a = b.begin("", SessionConfig{Cloud: &CloudOptions{}}, false)
						b.p.wait(way.method, 1)
						over = ended()
					case "interest", "update":
						method := "session.eventLog.registerInterest"
						if point == "update" {
							method = "session.options.update"
						}
						hold(method)
						a = b.begin("s", followUps(), false)
						b.accept(1, "s")
						b.p.wait(method, 1)
						over = ended()
						if name == "Stop" { // it is there, so it is released
							destroyed = append(destroyed, "s")
						}
					}
					want, last := ErrClosed, io.EOF
					if name == "loss" {
						want, last = io.ErrUnexpectedEOF, io.ErrUnexpectedEOF
					}
					expectFailure(t, await(t, "start", a.result), id, want)
					expectEnd(t, a.sub, last)
					if err := await(t, "end", over); err != nil {
						t.Errorf("the end: %v", err)
					}
					await(t, "client's end", b.c.Done())
					await(t, "peer's end", b.p.ended)
					var got []string
					for _, m := range b.p.calls("session.destroy") {
						got = append(got, m.get("sessionId").(string))
					}
					if !slices.Equal(got, destroyed) {
						t.Errorf("destroyed %q, want %q", got, destroyed)
					}
					expectRoutes(t, b.c)
					if _, err := way.prepare(t, b.c, "s2", SessionConfig{}).Start(testContext(t)); !errors.Is(err, want) {
						t.Errorf("a start afterwards: %v", err)
					}
				})
			}
		}
	})
}

// TestAnswerMeetsStop lets the server accept a start when Stop has passed it over.
func TestAnswerMeetsStop(t *testing.T) {
	for _, id := range []string{"s", ""} {
		leakCheck(t)
		b := newStartBed(t, prepWays[0])
		b.c.opts.StopGrace = patience
		other := b.begin("other", SessionConfig{}, false) // keeps Stop waiting
		b.accept(1, "other")
		if err := await(t, "start", other.result); err != nil {
			t.Fatal(err)
		}
		b.p.handle("session.destroy", func(p *peer, m peerMessage) any {
			if m.get("sessionId") == "other" {
				return noAnswer
			}
			return map[string]any{"success": true}
		})
		cfg := SessionConfig{}
		if id == "" {
			cfg.Cloud = &CloudOptions{}
		}
		a := b.begin(id, cfg, false)
		b.p.wait("session.create", 2)
		stopped := async(func() error { return b.c.Stop(testContext(t)) })
		destroy := b.p.wait("session.destroy", 1)
		if id != "" {
			expectFailure(t, await(t, "start", a.result), id, ErrClosed)
			expectRoutes(t, b.c, "other")
		}
		b.accept(2, "s")
		if m := b.p.wait("session.destroy", 2); m.get("sessionId") != "s" {
			t.Errorf("released %v", m.get("sessionId"))
		}
		b.p.answer(destroy.ID, map[string]any{"success": true})
		if err := await(t, "stop", stopped); err != nil {
			t.Error(err)
		}
		if id == "" {
			expectFailure(t, await(t, "start", a.result), id, ErrClosed)
		}
		expectEnd(t, a.sub, io.EOF)
		expectRoutes(t, b.c)
	}
}

// TestAnswerMeetsTheEnd handles an answer on the reader after the connection's end has been told to everybody.
func TestAnswerMeetsTheEnd(t *testing.T) {
	lost := errors.New("lost")
	for _, test := range []struct {
		end  func(c *Client)
		want error
	}{
		{(*Client).ForceStop, ErrClosed},
		{func(c *Client) { c.conn.fail(lost) }, lost},
	} {
		leakCheck(t)
		c, _ := newPeer(t, nil)
		p, err := c.PrepareSession(&SessionConfig{Cloud: &CloudOptions{}})
		if err != nil {
			t.Fatal(err)
		}
		p.session.start = &start{ctx: testContext(t)}
		test.end(c)
		await(t, "client's end", c.Done())
		p.session.answered(json.RawMessage(`{"sessionId":"cloud"}`), nil)
		expectRoutes(t, c)
		if err := p.session.opened(json.RawMessage(`{"sessionId":"cloud"}`)); !errors.Is(err, test.want) {
			t.Errorf("got %v, want %v", err, test.want)
		}
	}
}

// TestRetireSparesTheNextStart fails a start whose session was deleted and whose id is being started again already.
func TestRetireSparesTheNextStart(t *testing.T) {
	b := newStartBed(t, prepWays[0])
	s := b.ready("s", SessionConfig{}).prepared.session
	s.start = &start{ctx: testContext(t), accepted: true}
	a := b.begin("s", SessionConfig{}, false)
	b.p.wait("session.create", 1)
	_ = b.c.retire(s, ErrSessionNotFound)
	b.expectDestroyed("nothing")
	b.accept(1, "s")
	if err := await(t, "start", a.result); err != nil {
		t.Error(err)
	}
}

// TestStopDuringFollowUp releases a session that the server has, though its start has not returned: once, also where the start ends by its ctx
// or is completed meanwhile.
func TestStopDuringFollowUp(t *testing.T) {
	for _, completed := range []bool{true, false} {
		leakCheck(t)
		b := newStartBed(t, prepWays[0])
		b.c.opts.StopGrace = patience
		for _, method := range []string{"session.options.update", "session.destroy"} {
			b.p.handle(method, func(*peer, peerMessage) any { return noAnswer })
		}
		a := b.begin("s", followUps(), false)
		b.accept(1, "s")
		update := b.p.wait("session.options.update", 1)
		stopped := async(func() error { return b.c.Stop(testContext(t)) })
		destroy := b.p.wait("session.destroy", 1)
		expectFailure(t, second(b.c.CreateSession(testContext(t), &SessionConfig{SessionID: "s2"})), "s2", ErrClosed)
		if n := len(b.p.calls("session.create")); n != 1 {
			t.Errorf("started during the stop")
		}
		want, last := ErrClosed, io.EOF
		if completed {
			b.p.answer(update.ID, map[string]any{})
			for i := 0; i < 10; i++ {
				b.p.sync() // so that it has noticed, most probably
			}
		} else {
			a.ctx.ended.Store(true)
			close(a.ctx.done)
			want, last = context.Canceled, context.Canceled
			expectFailure(t, await(t, "start", a.result), "s", want)
		}
		b.p.handle("session.destroy", func(*peer, peerMessage) any { return map[string]any{"success": false} })
		b.p.answer(destroy.ID, map[string]any{"success": true})
		if completed {
			expectFailure(t, await(t, "start", a.result), "s", want)
		}
		if err := await(t, "stop", stopped); err != nil {
			t.Error(err)
		}
		if n := len(b.p.calls("session.destroy")); n != 1 {
			t.Errorf("completed %v: %d releases", completed, n)
		}
		expectEnd(t, a.sub, last)
	}
}

// TestDeletedDuringStart ends a start with the notice that its session was deleted.
func TestDeletedDuringStart(t *testing.T) {
	prepEachWay(t, func(t *testing.T, way prepWay) {
		for _, method := range []string{way.method, "session.options.update"} {
			b := newStartBed(t, way)
			b.p.handle("session.options.update", func(*peer, peerMessage) any { return noAnswer })
			a := b.begin("s", followUps(), false)
			if method != way.method {
				b.accept(1, "s")
			}
			b.p.wait(method, 1)
			b.p.send(notification("session.lifecycle", map[string]any{"type": "session.deleted", "sessionId": "s"}))
			expectFailure(t, await(t, "start", a.result), "s", ErrSessionNotFound)
			expectEnd(t, a.sub, ErrSessionNotFound)
			if method == way.method {
				b.accept(1, "s") // made again, by whatever: nobody wants it
			}
			b.expectDestroyed(method, "s")
			expectRoutes(t, b.c)
		}
	})
}

// TestReleaseOfWhatIsGone is no failure.
func TestReleaseOfWhatIsGone(t *testing.T) {
	for _, answer := range []any{map[string]any{"success": false}, &peerError{Code: -32603, Message: "Session not found for sessionId: s"}} {
		c, p := newPeer(t, nil)
		s := createSession(t, c, &SessionConfig{SessionID: "s"})
		p.handle("session.destroy", func(*peer, peerMessage) any { return answer })
		if err := s.Disconnect(testContext(t)); err != nil {
			t.Error(err)
		}
		expectRoutes(t, c)
	}
}

// TestStartAwaitsRelease starts the id of a session whose Disconnect gave up waiting, and of one that a failed start is releasing.
func TestStartAwaitsRelease(t *testing.T) {
	prepEachWay(t, func(t *testing.T, way prepWay) {
		for _, failed := range []bool{false, true} {
			b := newStartBed(t, way)
			b.p.handle("session.destroy", func(*peer, peerMessage) any { return noAnswer })
			if failed {
				b.p.refuse("session.options.update", -32603, "no")
			}
			first := b.begin("s", followUps(), false)
			b.accept(1, "s")
			if err := await(t, "start", first.result); (err != nil) != failed {
				t.Fatal(err)
			}
			if !failed {
				ctx, cancel := context.WithCancel(context.Background())
				left := async(func() error { return first.session.Disconnect(ctx) })
				b.p.wait("session.destroy", 1)
				cancel()
				expectFailure(t, await(t, "disconnect", left), "s", context.Canceled)
				expectEnd(t, first.sub, io.EOF)
			}
			destroy := b.p.wait("session.destroy", 1)
			second := b.begin("s", SessionConfig{}, false)
			until(t, "reservation", func() bool { return b.owner("s") == second.prepared.session })
			third := b.begin("s", SessionConfig{}, false) // a start that waits counts as open
			expectFailure(t, await(t, "third", third.result), "s", ErrSessionOpen)
			b.p.emit("s", "of the first", nil)
			b.p.sync()
			if n := len(b.p.calls(way.method)); n != 1 {
				t.Fatalf("written before the release was answered: %d", n)
			}
			b.p.answer(destroy.ID, map[string]any{"success": true})
			b.p.wait(way.method, 2)
			b.p.emit("s", "of the second", nil)
			b.accept(2, "s")
			if err := await(t, "second", second.result); err != nil {
				t.Fatal(err)
			}
			if e := next(t, second.sub); e.Type != "of the second" {
				t.Errorf("got %v", e.Type)
			}
		}
	})
}

// TestRequestsDuringStart are served by the session's handlers before the server has answered the start; they end with it.
func TestRequestsDuringStart(t *testing.T) {
	prepEachWay(t, func(t *testing.T, way prepWay) {
		b := newStartBed(t, way)
		hang := make(chan error, 1)
		notices := make(chan string, 1)
		cfg := SessionConfig{Handlers: map[string]HandlerFunc{
			"file.read": func(ctx context.Context, method string, params json.RawMessage) (any, error) { return "content", nil },
			"notice": func(ctx context.Context, method string, params json.RawMessage) (any, error) {
				notices <- string(params)
				return nil, nil
			},
			"hang": func(ctx context.Context, method string, params json.RawMessage) (any, error) {
				hang <- nil
				<-ctx.Done()
				hang <- context.Cause(ctx)
				return nil, nil
			},
		}}
		a := b.begin("s", cfg, false)
		b.p.wait(way.method, 1)
		if m := b.p.request("file.read", map[string]any{"sessionId": "s"}); string(m.Result) != `"content"` {
			t.Errorf("answered %s %v", m.Result, m.Error)
		}
		if m := b.p.request("file.read", map[string]any{"sessionId": "another"}); m.Error == nil {
			t.Error("served for another session")
		}
		b.p.send(notification("notice", map[string]any{"sessionId": "s"}))
		if got := await(t, "notice", notices); got != `{"sessionId":"s"}` {
			t.Errorf("notice %s", got)
		}
		asked := b.p.ask("hang", map[string]any{"sessionId": "s"})
		await(t, "handler", hang)
		b.p.answer(b.p.wait(way.method, 1).ID, &peerError{Code: -32603, Message: "Session not found"})
		if err := await(t, "start", a.result); !errors.Is(err, ErrSessionNotFound) {
			t.Error(err)
		}
		if err := await(t, "handler's end", hang); !errors.Is(err, ErrSessionNotFound) {
			t.Errorf("handler's cause: %v", err)
		}
		await(t, "its answer", asked)
	})
}

// TestRefusedStartKeepsTheTokenProvider is a second start of an open session, with the same name for its provider of tokens.
func TestRefusedStartKeepsTheTokenProvider(t *testing.T) {
	prepEachWay(t, func(t *testing.T, way prepWay) {
		c, _ := newPeer(t, nil)
		const name = "7b2f5c52-3f0f-4c53-9f38-0a4f7c8f6d11"
		cfg := SessionConfig{
			GitHubTokenProviderRegistrationID: name,
			GitHubTokenProvider: func(context.Context, GitHubTokenRequest) (*GitHubAccessToken, error) {
				return nil, nil
			},
		}
		if _, err := way.prepare(t, c, "s", cfg).Start(testContext(t)); err != nil {
			t.Fatal(err)
		}
		if _, err := way.prepare(t, c, "s", cfg).Start(testContext(t)); !errors.Is(err, ErrSessionOpen) {
			t.Fatal(err)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.host.registrations[name] == nil || c.host.registrations[name] != c.routes["s"].session {
			t.Error("the provider is gone")
		}
	})
}

// TestConcurrentStarts starts a thousand sessions at once, answered in reverse order where the server has several.
func TestConcurrentStarts(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	const n = 1000
	var mu sync.Mutex
	var waiting []peerMessage
	for _, way := range prepWays {
		p.handle(way.method, func(p *peer, m peerMessage) any {
			mu.Lock()
			defer mu.Unlock()
			if waiting = append(waiting, m); len(waiting) == 10 {
				for i := len(waiting) - 1; i >= 0; i-- {
					id := waiting[i].get("sessionId").(string)
					p.send(p.event(id, "session.start", map[string]any{"id": id}),
						map[string]any{"jsonrpc": "2.0", "id": waiting[i].ID, "result": map[string]any{"sessionId": id}})
				}
				waiting = nil
			}
			return noAnswer
		})
	}
	failures := make(chan error, n)
	for i := 0; i < n; i++ {
		prepared := prepWays[i%2].prepare(t, c, fmt.Sprint("s", i), SessionConfig{})
		sub := prepared.Subscribe()
		go func() { // ends with the start and its disconnect
			failures <- func() error {
				s, err := prepared.Start(testContext(t))
				if err != nil {
					return err
				}
				e, err := sub.Next(testContext(t))
				if err != nil || string(e.Data) != fmt.Sprintf(`{"id":%q}`, s.ID()) {
					return fmt.Errorf("%s: got %s %v", s.ID(), e.Data, err)
				}
				if i%2 == 0 {
					return s.Disconnect(testContext(t))
				}
				return nil
			}()
		}()
	}
	for i := 0; i < n; i++ {
		if err := await(t, "start", failures); err != nil {
			t.Error(err)
		}
	}
	if err := c.Stop(testContext(t)); err != nil {
		t.Error(err)
	}
	if got := len(p.calls("session.destroy")); got != n {
		t.Errorf("%d releases", got)
	}
	expectRoutes(t, c)
}

// prepFlood sends n events and an ephemeral idle before the answer to a start.
func prepFlood(b *startBed, id string, n int) {
	request := b.p.wait(b.way.method, 1)
	var all []any
	for i := 0; i < n; i++ {
		all = append(all, b.p.event(id, "n", i))
	}
	all = append(all, b.p.event(id, "session.idle", map[string]any{}, "ephemeral", true),
		map[string]any{"jsonrpc": "2.0", "id": request.ID, "result": map[string]any{"sessionId": id}})
	b.p.send(all...)
}

// TestCase001FloodBeforeTheAnswer reads everything that came before the answer, with a consumer beside the start and one after it.
func TestCase001FloodBeforeTheAnswer(t *testing.T) {
	const n = 600
	consume := func(t *testing.T, events func(func(Event, error) bool)) error {
		i := 0
		for e, err := range events {
			switch {
			case err != nil:
				return err
			case e.Type == EventSessionIdle:
				if i != n || !e.Ephemeral {
					return fmt.Errorf("idle after %d, ephemeral %v", i, e.Ephemeral)
				}
				return nil
			case string(e.Data) != fmt.Sprint(i):
				return fmt.Errorf("event %d is %s", i, e.Data)
			}
			i++
		}
		return errors.New("no idle")
	}
	prepEachWay(t, func(t *testing.T, way prepWay) {
		for _, deferred := range []bool{false, true} {
			b := newStartBed(t, way)
			cfg := SessionConfig{ContinuePendingWork: way.name == "resume", EventBuffer: n + 1}
			a := b.ready("s", cfg)
			early := a.prepared.Events(testContext(t))
			var result <-chan error
			if !deferred {
				result = async(func() error { return consume(t, early) })
			}
			a.start(false)
			prepFlood(b, "s", n)
			if err := await(t, "start", a.result); err != nil {
				t.Fatal(err)
			}
			late := a.session.Subscribe()
			if deferred {
				result = async(func() error { return consume(t, early) })
			}
			if err := await(t, "consumer", result); err != nil {
				t.Errorf("deferred %v: %v", deferred, err)
			}
			if err := consume(t, a.sub.All(testContext(t))); err != nil {
				t.Errorf("second subscriber: %v", err)
			}
			b.p.emit("s", "live", nil)
			for _, sub := range []*Subscription[Event]{a.sub, late} { // early and late, one stream
				if e := next(t, sub); e.Type != "live" {
					t.Errorf("got %v", e.Type)
				}
			}
		}
	})
}

func TestStartWithASmallRing(t *testing.T) {
	prepEachWay(t, func(t *testing.T, way prepWay) {
		b := newStartBed(t, way)
		const n, size = 600, 50
		a := b.begin("s", SessionConfig{EventBuffer: size}, false)
		prepFlood(b, "s", n)
		if err := await(t, "start", a.result); err != nil {
			t.Fatal(err)
		}
		b.p.emit("s", "live", nil)
		b.p.sync()
		i, skipped := -1, uint64(0)
		for e, err := range a.sub.All(testContext(t)) {
			var lag *LagError
			switch {
			case i < 0:
				if !errors.As(err, &lag) {
					t.Fatalf("first pair: %v %v", e.Type, err)
				}
				if skipped = lag.Skipped; skipped != n+2-size {
					t.Errorf("skipped %d, want %d", skipped, n+2-size)
				}
				i = int(skipped)
				continue
			case err != nil:
				t.Fatal(err)
			case i < n && string(e.Data) != fmt.Sprint(i), i == n && e.Type != EventSessionIdle, i == n+1 && e.Type != "live":
				t.Errorf("event %d is %v %s", i, e.Type, e.Data)
			}
			if i++; i == n+2 {
				break
			}
		}
		b.p.emit("s", "tail", nil)
		if e := next(t, a.sub); e.Type != "tail" {
			t.Errorf("got %v", e.Type)
		}
	})
}

// TestNothingIsStoredForNobody looks into the ring.
func TestNothingIsStoredForNobody(t *testing.T) {
	c, p := newPeer(t, nil)
	s := createSession(t, c, &SessionConfig{SessionID: "s", EventBuffer: 1 << 20})
	p.emit("s", "x", nil)
	p.sync()
	if s.ring.slots != nil {
		t.Error("stored without a subscriber")
	}
	sub := s.Subscribe()
	p.emit("s", "y", nil)
	if e := next(t, sub); e.Type != "y" || len(s.ring.slots) > 16 {
		t.Errorf("%v, %d slots", e.Type, len(s.ring.slots))
	}
}

// TestCase001FirstEvents gets the first event in the same write as the answer.
func TestCase001FirstEvents(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	p.handle("session.create", func(p *peer, m peerMessage) any {
		id := m.get("sessionId").(string)
		p.send(map[string]any{"jsonrpc": "2.0", "id": m.ID, "result": map[string]any{"sessionId": id}}, p.event(id, "session.start", nil))
		return noAnswer
	})
	for i := 0; i < 500; i++ {
		prepared, err := c.PrepareSession(nil)
		if err != nil {
			t.Fatal(err)
		}
		events := prepared.Events(testContext(t))
		s, err := prepared.Start(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		for e, err := range events {
			if err != nil || e.Type != EventSessionStart {
				t.Fatalf("%d: first is %v %v", i, e.Type, err)
			}
			break
		}
		if err := s.Disconnect(testContext(t)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCase002RefusedCreates(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	accept := p.on["session.create"]
	p.refuse("session.create", -32077, "not today")
	for i := 0; i < 100; i++ {
		var refusal *RPCError
		if _, err := c.CreateSession(testContext(t), &SessionConfig{SessionID: "s"}); !errors.As(err, &refusal) || refusal.Code != -32077 || refusal.Message != "not today" {
			t.Fatal(err)
		}
		expectRoutes(t, c)
	}
	p.handle("session.create", accept)
	createSession(t, c, &SessionConfig{SessionID: "s"})
	if got := released(t, c, p, "session.destroy"); got != nil {
		t.Errorf("released %q", got)
	}
}

// TestCase004ReplayedIdle replays an old turn after a resume, before the answer to the first send and after it.
func TestCase004ReplayedIdle(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s, err := c.ResumeSession(testContext(t), "s", nil)
	if err != nil {
		t.Fatal(err)
	}
	turn := func(id, text string) []any {
		return []any{
			p.event("s", "user.message", map[string]any{"messageId": id, "content": "x"}),
			p.event("s", "assistant.message", map[string]any{"messageId": "a" + id, "content": text}),
			p.event("s", "session.idle", map[string]any{}),
		}
	}
	p.send(turn("m0", "old")...)
	p.handle("session.send", func(p *peer, m peerMessage) any {
		p.send(append(turn("m0", "old"), map[string]any{"jsonrpc": "2.0", "id": m.ID, "result": map[string]any{"messageId": "m1"}})...)
		p.send(turn("m0", "old")...)
		return noAnswer
	})
	var got *AssistantMessage
	result := async(func() (err error) {
		got, err = s.SendAndWait(testContext(t), Message{Prompt: "new"})
		return err
	})
	p.wait("session.send", 1)
	p.sync()
	p.send(turn("m1", "new")...)
	if err := await(t, "turn", result); err != nil || got == nil || got.Content != "new" {
		t.Errorf("got %+v %v", got, err)
	}
}

func TestCase005ForgottenSession(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, &SessionConfig{SessionID: "s"})
	sub := s.Subscribe()
	p.refuse("session.send", -32603, "Session not found for sessionId: s")
	expectFailure(t, second(s.Send(testContext(t), Message{Prompt: "x"})), "s", ErrSessionNotFound)
	expectEnd(t, sub, ErrSessionNotFound)
	if cause := context.Cause(s.Context()); !errors.Is(cause, ErrSessionNotFound) {
		t.Errorf("cause %v", cause)
	}
	if _, err := c.ResumeSession(testContext(t), "s", nil); err != nil {
		t.Errorf("resume: %v", err)
	}
}

// TestCase008Generations closes and reopens one id at once; each generation sees its own event.
func TestCase008Generations(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	generation := 0
	p.handle("session.resume", func(p *peer, m peerMessage) any {
		generation++
		p.emit("x", "generation", generation)
		return map[string]any{"sessionId": "x"}
	})
	var previous *Subscription[Event]
	for i := 1; i <= 200; i++ {
		prepared, err := c.PrepareResumeSession("x", nil)
		if err != nil {
			t.Fatal(err)
		}
		sub := prepared.Subscribe()
		var s *Session
		if err := await(t, "start", async(func() (err error) {
			s, err = prepared.Start(testContext(t))
			return err
		})); err != nil {
			t.Fatal(err)
		}
		if e := next(t, sub); string(e.Data) != fmt.Sprint(i) {
			t.Fatalf("generation %d got %s", i, e.Data)
		}
		if previous != nil {
			expectEnd(t, previous, io.EOF)
		}
		previous = sub
		ctx, cancel := context.WithCancel(context.Background())
		if i%2 == 0 {
			cancel() // leave without waiting
		}
		if err := s.Disconnect(ctx); err != nil && i%2 != 0 {
			t.Fatal(err)
		}
		cancel()
	}
}
