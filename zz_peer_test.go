package copilot

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"runtime/pprof"
	"strings"
	"sync"
	"testing"
	"time"
)

// patience is how long a test waits for what must happen. Nothing passes by waiting for it.
const patience = 10 * time.Second

// testContext returns a context that ends with the test, at the latest after patience.
func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// await waits for c to be closed or to deliver.
func await[T any](t testing.TB, what string, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(patience):
		var stacks bytes.Buffer
		_ = pprof.Lookup("goroutine").WriteTo(&stacks, 1)
		t.Fatalf("%s: nothing after %v\n%s", what, patience, stacks.String())
	}
	return v
}

// async runs f on a goroutine and returns where its error comes out.
func async(f func() error) <-chan error {
	c := make(chan error, 1)
	go func() { c <- f() }()
	return c
}

// leakCheck fails the test when, at its end, there are more goroutines or descriptors than now. Not for parallel tests.
func leakCheck(t testing.TB) {
	t.Helper()
	goroutines, files := runtime.NumGoroutine(), openFiles()
	t.Cleanup(func() {
		deadline := time.Now().Add(5 * time.Second)
		for {
			g, f := runtime.NumGoroutine(), openFiles()
			if g <= goroutines && f <= files {
				return
			}
			if time.Now().After(deadline) {
				var stacks bytes.Buffer
				_ = pprof.Lookup("goroutine").WriteTo(&stacks, 1)
				t.Errorf("left behind: %d goroutines were %d, %d descriptors were %d\n%s", g, goroutines, f, files, stacks.String())
				return
			}
			runtime.Gosched()
			time.Sleep(time.Millisecond) // polling: nothing signals the end of a goroutine
		}
	})
}

func openFiles() int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(entries)
}

// peer is a scripted server: the other end of a client's connection. It answers what the client asks, by a handler of the test's where
// there is one, and remembers it.
type peer struct {
	t    testing.TB
	conn io.ReadWriteCloser

	writing sync.Mutex
	mu      sync.Mutex
	on      map[string]peerHandler
	seen    []peerMessage
	arrived chan struct{} // closed and replaced at each message
	answers map[string]chan peerMessage
	nextID  int
	events  int
	ended   chan struct{} // the client's end was closed
}

type peerMessage struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
	Result json.RawMessage `json:"result"`
	Error  *peerError      `json:"error"`
}

type peerError struct {
	Code    int             `json:"code"`
	Message string          `json:"message"`
	Data    json.RawMessage `json:"data,omitempty"`
}

// get returns a member of the params, decoded.
func (m peerMessage) get(name string) any {
	var params map[string]any
	_ = json.Unmarshal(m.Params, &params)
	return params[name]
}

// peerHandler answers a request: with a result, with a *peerError, or not at all with noAnswer.
type peerHandler func(p *peer, m peerMessage) any

type silence struct{}

var noAnswer = silence{}

// newPeer returns a client that is connected to a scripted server over an unbuffered pipe. Both end with the test.
func newPeer(t testing.TB, opts *Options) (*Client, *peer) {
	t.Helper()
	near, far := net.Pipe()
	p := startPeer(t, far)
	c, err := NewClient(testContext(t), near, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.ForceStop()
		await(t, "client's end", c.Done())
	})
	return c, p
}

func startPeer(t testing.TB, conn io.ReadWriteCloser) *peer {
	p := &peer{t: t, conn: conn, arrived: make(chan struct{}), answers: make(map[string]chan peerMessage), ended: make(chan struct{})}
	sends := 0
	p.on = map[string]peerHandler{
		"connect": func(*peer, peerMessage) any {
			return map[string]any{"ok": true, "protocolVersion": 3, "version": "1.0.102"}
		},
		"ping":           func(p *peer, m peerMessage) any { return map[string]any{"message": "pong", "protocolVersion": 3} },
		"session.create": func(p *peer, m peerMessage) any { return map[string]any{"sessionId": m.get("sessionId")} },
		"session.resume": func(p *peer, m peerMessage) any { return map[string]any{"sessionId": m.get("sessionId")} },
		"session.destroy": func(p *peer, m peerMessage) any {
			return map[string]any{"success": true}
		},
		"session.send": func(p *peer, m peerMessage) any {
			sends++
			return map[string]any{"messageId": fmt.Sprint("m", sends)}
		},
	}
	go p.run() // ends when the client closes its end, which the cleanup makes sure of
	t.Cleanup(func() {
		conn.Close()
		await(t, "peer's end", p.ended)
	})
	return p
}

func (p *peer) run() {
	defer close(p.ended)
	defer p.conn.Close()
	r := newFrameReader(p.conn, defaultMaxFrame)
	for {
		body, err := r.next()
		if err != nil {
			if err != io.EOF && !errors.Is(err, io.ErrClosedPipe) && !errors.Is(err, net.ErrClosed) && !errors.Is(err, io.ErrUnexpectedEOF) && !strings.Contains(err.Error(), "reset") {
				p.t.Errorf("peer: %v", err)
			}
			return
		}
		var m peerMessage
		if err := json.Unmarshal(body, &m); err != nil {
			p.t.Errorf("peer: %v in %q", err, body)
			return
		}
		p.mu.Lock()
		p.seen = append(p.seen, m)
		close(p.arrived)
		p.arrived = make(chan struct{})
		answer := p.answers[string(m.ID)]
		if m.Method == "" {
			delete(p.answers, string(m.ID))
		}
		h := p.on[m.Method]
		p.mu.Unlock()
		switch {
		case m.Method == "":
			if answer != nil {
				answer <- m
			}
		case m.ID != nil:
			var result any = map[string]any{}
			if h != nil {
				result = h(p, m)
			}
			if result != noAnswer {
				p.answer(m.ID, result)
			}
		}
	}
}

// handle sets the answer to a method.
func (p *peer) handle(method string, h peerHandler) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.on[method] = h
}

// refuse makes the server refuse a method.
func (p *peer) refuse(method string, code int, message string) {
	p.handle(method, func(*peer, peerMessage) any { return &peerError{Code: code, Message: message} })
}

func (p *peer) answer(id json.RawMessage, result any) {
	if e, ok := result.(*peerError); ok {
		p.send(map[string]any{"jsonrpc": "2.0", "id": id, "error": e})
		return
	}
	p.send(map[string]any{"jsonrpc": "2.0", "id": id, "result": result})
}

// send writes messages as one write.
func (p *peer) send(messages ...any) {
	var b []byte
	for _, m := range messages {
		b = append(b, encodeFrame(m)...)
	}
	p.raw(b)
}

func encodeFrame(m any) []byte {
	body, err := json.Marshal(m)
	if err != nil {
		panic(err)
	}
	return append(fmt.Appendf(nil, "Content-Length: %d\r\n\r\n", len(body)), body...)
}

// raw writes bytes as they are. That the client is gone is not an error here.
func (p *peer) raw(b []byte) {
	p.writing.Lock()
	defer p.writing.Unlock()
	_, _ = p.conn.Write(b)
}

// event makes a session.event notification. extra are further members of the envelope, by name and value.
func (p *peer) event(session, typ string, data any, extra ...any) map[string]any {
	p.mu.Lock()
	p.events++
	n := p.events
	p.mu.Unlock()
	e := map[string]any{"id": fmt.Sprint("e", n), "timestamp": "2026-01-02T03:04:05.678Z", "parentId": nil, "type": typ, "data": data}
	for i := 0; i+1 < len(extra); i += 2 {
		e[extra[i].(string)] = extra[i+1]
	}
	return notification("session.event", map[string]any{"sessionId": session, "event": e})
}

func notification(method string, params any) map[string]any {
	return map[string]any{"jsonrpc": "2.0", "method": method, "params": params}
}

// emit sends one event.
func (p *peer) emit(session, typ string, data any, extra ...any) {
	p.send(p.event(session, typ, data, extra...))
}

// request asks the client and returns its answer.
func (p *peer) request(method string, params any) peerMessage {
	p.t.Helper()
	return await(p.t, "answer to "+method, p.ask(method, params))
}

// ask asks the client and returns where its answer will come out.
func (p *peer) ask(method string, params any) <-chan peerMessage {
	p.mu.Lock()
	p.nextID++
	id := fmt.Sprint(p.nextID)
	c := make(chan peerMessage, 1)
	p.answers[id] = c
	p.mu.Unlock()
	p.send(map[string]any{"jsonrpc": "2.0", "id": json.RawMessage(id), "method": method, "params": params})
	return c
}

// sync returns when the client has handled everything that was sent before.
func (p *peer) sync() { p.request("test.sync", nil) }

// calls returns the requests of one method so far, of all methods for "".
func (p *peer) calls(method string) (found []peerMessage) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.seen {
		if m.Method != "" && (m.Method == method || method == "") {
			found = append(found, m)
		}
	}
	return found
}

// wait returns the n-th request of a method, as soon as it has come.
func (p *peer) wait(method string, n int) peerMessage {
	p.t.Helper()
	deadline := time.After(patience)
	for {
		p.mu.Lock()
		arrived := p.arrived
		p.mu.Unlock()
		if found := p.calls(method); len(found) >= n {
			return found[n-1]
		}
		select {
		case <-arrived:
		case <-deadline:
			p.t.Fatalf("no %s number %d", method, n)
		}
	}
}

// createSession creates a session at the peer.
func createSession(t testing.TB, c *Client, cfg *SessionConfig) *Session {
	t.Helper()
	s, err := c.CreateSession(testContext(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// next returns the next event of a subscription.
func next(t testing.TB, sub *Subscription[Event]) Event {
	t.Helper()
	e, err := sub.Next(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	return e
}
