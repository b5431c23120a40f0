package copilot

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
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
	"math"
	"math/big"
	"math/rand"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/fstest"
	"testing/iotest"
	"time"
	"unicode"
)

// TestMain makes the test binary play the CLI, or its host, where a test has started it as a child.
func TestMain(m *testing.M) {
	child := os.Getenv("COPILOT_TEST_CHILD")
	switch mode, script, _ := strings.Cut(child, ":"); mode {
	case "":
		// The poller opens descriptors of its own at its first use. No test's leak check shall count them.
		if r, w, err := os.Pipe(); err == nil {
			r.Close()
			w.Close()
		}
		os.Exit(m.Run())
	case "spine":
		os.Exit(spineChild(script))
	case "bench":
		newBenchServer(os.Stdin, os.Stdout).serve()
		os.Exit(0)
	case "mcp":
		os.Exit(matrixMCP())
	default:
		os.Exit(procChild(child))
	}
}

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

// poll waits for what nothing signals, such as the end of a goroutine or a write to a file. It returns false when ctx ends first.
func poll(ctx context.Context, done func() bool) bool {
	for !done() {
		select {
		case <-ctx.Done():
			return done()
		case <-time.After(time.Millisecond):
		}
	}
	return true
}

// until is poll for what must happen.
func until(t testing.TB, what string, done func() bool) {
	t.Helper()
	if !poll(testContext(t), done) {
		t.Fatalf("%s: not after %v", what, patience)
	}
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
		var g, f int
		if !poll(testContext(t), func() bool {
			g, f = runtime.NumGoroutine(), openFiles()
			return g <= goroutines && f <= files
		}) {
			var stacks bytes.Buffer
			_ = pprof.Lookup("goroutine").WriteTo(&stacks, 1)
			t.Errorf("left behind: %d goroutines were %d, %d descriptors were %d: %v\n%s", g, goroutines, f, files, openFileNames(), stacks.String())
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

// openFileNames says what the open descriptors are.
func openFileNames() (names []string) {
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		name, _ := os.Readlink("/proc/self/fd/" + e.Name())
		names = append(names, e.Name()+" "+name)
	}
	return names
}

// kill kills a process that the test has started. It lets go of the handle: a Process holds a descriptor on Linux, which the
// collector would close some time.
func kill(t testing.TB, pid int) {
	t.Helper()
	p, err := os.FindProcess(pid)
	if err != nil {
		t.Error(err)
		return
	}
	defer p.Release()
	if err := p.Kill(); err != nil {
		t.Errorf("kill: %v", err)
	}
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

// A modelServer plays a model behind an OpenAI-compatible endpoint, so that a real CLI runs whole turns without login or
// network. The prompt says what the model does, on a line of its own among those that the CLI puts around it:
//
//	say: TEXT                    answer TEXT, streamed word by word
//	call: NAME {ARGS}            call a tool; answer "tool said: RESULT" when its result is back
//	calls: NAME {..} ; NAME {..} call several at once; their results are joined by " | "
//	hold: TEXT                   stream the first word, report on Held, wait for Release, stream the rest
//	cut: TEXT                    stream the first word, then break the connection
//	status: CODE                 refuse with that HTTP status
//	history                      list the earlier prompts' scripts, joined by " | "
//
// Anything else is answered "no script".
type modelServer struct {
	http.Handler

	URL  string        // the provider's baseUrl is URL + "/v1"
	Held chan struct{} // receives one value for each answer that is held

	release chan struct{} // receives one value for each Release; closed when the test ends

	mu       sync.Mutex
	requests []modelRequest
}

// A modelRequest is one completion that the CLI asked for.
type modelRequest struct {
	Header   http.Header `json:"-"`
	Body     []byte      `json:"-"`
	Stream   bool
	Messages []modelMessage
}

// A modelMessage is one message of a modelRequest's conversation, its parts joined by newlines.
type modelMessage struct {
	Role, Text string
}

func (m *modelMessage) UnmarshalJSON(data []byte) error {
	var wire struct {
		Role    string
		Content any // a string, a list of parts, or null beside tool calls
	}
	if err := json.Unmarshal(data, &wire); err != nil {
		return err
	}
	m.Role = wire.Role
	switch content := wire.Content.(type) {
	case string:
		m.Text = content
	case []any:
		for _, part := range content {
			p, _ := part.(map[string]any)
			text, _ := p["text"].(string)
			m.Text += text + "\n"
		}
	}
	return nil
}

// newModel returns a modelServer that listens nowhere: only its Handler works.
func newModel() *modelServer {
	m := &modelServer{Held: make(chan struct{}, 64), release: make(chan struct{}, 64)} // room enough never to block
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, `{"object":"list","data":[{"id":"fake-model","object":"model"}]}`)
	})
	mux.HandleFunc("POST /v1/chat/completions", m.serveCompletion)
	m.Handler = mux
	return m
}

// newModelServer starts a modelServer and ends it with the test.
func newModelServer(t *testing.T) *modelServer {
	t.Helper()
	m := newModel()
	srv := httptest.NewServer(m)
	m.URL = srv.URL
	t.Cleanup(func() {
		close(m.release) // before Close, which waits for the handlers
		srv.Close()
	})
	return m
}

// Provider returns the provider member of session.create and session.resume; the model's name does not matter.
func (m *modelServer) Provider() map[string]any {
	return map[string]any{"type": "openai", "wireApi": "completions", "baseUrl": m.URL + "/v1", "apiKey": "dummy"}
}

// Release lets one held answer go on. Called early, it counts for the next one.
func (m *modelServer) Release() { m.release <- struct{}{} }

// Requests returns the completions asked for so far, oldest first and with the CLI's retries.
func (m *modelServer) Requests() []modelRequest {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.requests)
}

func (m *modelServer) serveCompletion(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	req := modelRequest{Header: r.Header, Body: body}
	if err := errors.Join(err, json.Unmarshal(body, &req)); err != nil {
		refuseCompletion(w, http.StatusBadRequest, err.Error())
		return
	}
	m.mu.Lock()
	m.requests = append(m.requests, req)
	n := len(m.requests)
	m.mu.Unlock()

	earlier, script, results := readConversation(req.Messages)
	verb, text, _ := strings.Cut(script, ":")
	text = strings.TrimSpace(text)
	c := &completion{w: w, stream: req.Stream}
	switch verb {
	case "say":
		c.write(text)
	case "hold", "cut":
		first, rest, _ := strings.Cut(text, " ")
		c.write(first + " ")
		if verb == "cut" {
			panic(http.ErrAbortHandler) // closes the connection
		}
		m.Held <- struct{}{}
		select {
		case <-m.release:
			c.write(rest)
		case <-r.Context().Done(): // the CLI hung up
			return
		}
	case "call", "calls":
		if len(results) > 0 {
			c.write("tool said: " + strings.Join(results, " | "))
			break
		}
		if c.calls, err = parseToolCalls(text, n); err != nil {
			refuseCompletion(w, http.StatusBadRequest, err.Error())
			return
		}
	case "status":
		code, _ := strconv.Atoi(text)
		refuseCompletion(w, max(code, http.StatusBadRequest), "scripted status "+text)
		return
	case "history":
		c.write(strings.Join(earlier, " | "))
	default:
		c.write("no script")
	}
	c.end()
}

// readConversation returns the last user message's script, those of the user messages before it, and the tool results
// that came after it.
func readConversation(messages []modelMessage) (earlier []string, script string, results []string) {
	line := regexp.MustCompile(`(?m)^(say|calls?|hold|cut|status): .*$|^history$`)
	for _, m := range messages {
		switch m.Role {
		case "user":
			if script != "" {
				earlier = append(earlier, script)
			}
			script, results = line.FindString(m.Text), nil
		case "tool":
			results = append(results, strings.TrimSpace(m.Text))
		}
	}
	return earlier, script, results
}

// parseToolCalls reads "NAME {ARGS} ; NAME {ARGS}" into the wire form of tool calls; request makes their ids unique.
func parseToolCalls(s string, request int) ([]map[string]any, error) {
	var calls []map[string]any
	for s != "" {
		name, rest, _ := strings.Cut(s, " ")
		var args json.RawMessage
		dec := json.NewDecoder(strings.NewReader(rest))
		if err := dec.Decode(&args); err != nil {
			return nil, fmt.Errorf("script %q: arguments of %s: %w", s, name, err)
		}
		calls = append(calls, map[string]any{
			"index": len(calls), "id": fmt.Sprintf("call_%d_%d", request, len(calls)), "type": "function",
			"function": map[string]any{"name": name, "arguments": string(args)},
		})
		s = strings.TrimLeft(rest[dec.InputOffset():], " ;")
	}
	return calls, nil
}

// A completion is one answer of the model: streamed, its words go out at once, else all together at the end.
type completion struct {
	w      http.ResponseWriter
	stream bool
	text   string
	calls  []map[string]any
}

func (c *completion) write(text string) {
	c.text += text
	if !c.stream {
		return
	}
	for _, word := range strings.SplitAfter(text, " ") {
		c.chunk(map[string]any{"role": "assistant", "content": word}, nil)
	}
}

func (c *completion) end() {
	message, reason := map[string]any{"role": "assistant"}, "stop"
	if c.calls != nil {
		message["tool_calls"], reason = c.calls, "tool_calls"
	}
	if c.stream {
		c.chunk(message, reason)
		io.WriteString(c.w, "data: [DONE]\n\n")
		return
	}
	message["content"] = c.text
	c.w.Header().Set("Content-Type", "application/json")
	c.w.Write(completionBody("chat.completion", map[string]any{"message": message, "finish_reason": reason}))
}

// chunk streams one delta; reason is nil in all but the last.
func (c *completion) chunk(delta map[string]any, reason any) {
	c.w.Header().Set("Content-Type", "text/event-stream")
	choice := map[string]any{"delta": delta, "finish_reason": reason}
	fmt.Fprintf(c.w, "data: %s\n\n", completionBody("chat.completion.chunk", choice))
	c.w.(http.Flusher).Flush()
}

func completionBody(object string, choice map[string]any) []byte {
	choice["index"] = 0
	body, _ := json.Marshal(map[string]any{
		"id": "chatcmpl-1", "object": object, "created": 1, "model": "fake-model", "choices": []any{choice},
		"usage": map[string]any{"prompt_tokens": 10, "completion_tokens": 10, "total_tokens": 20},
	})
	return body
}

func refuseCompletion(w http.ResponseWriter, code int, why string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(map[string]any{"error": map[string]any{"message": why}})
}

// startReal starts the real CLI with a home of its own, opts.BaseDir or a new one, and skips the test where there is none.
func startReal(t *testing.T, opts Options) *Client {
	t.Helper()
	cli := os.Getenv("COPILOT_CLI_PATH")
	if cli == "" {
		t.Skip("skipped: COPILOT_CLI_PATH names no CLI to test against")
	}
	home := opts.BaseDir
	if home == "" {
		home = t.TempDir()
	}
	opts.CLI = cli
	cache := os.Getenv("XDG_CACHE_HOME")
	if cache == "" {
		cache = home
	}
	opts.Env = append(os.Environ(), "HOME="+home, "XDG_CACHE_HOME="+cache)
	opts.BaseDir = home
	opts.UseLoggedInUser = new(bool)
	c, err := Start(hdlContext(t), &opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Stop(hdlContext(t)); err != nil {
			t.Errorf("stop: %v", err)
		}
	})
	return c
}

func TestTurn(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	turn := func(id, text string) {
		p.send(
			p.event(s.ID(), "user.message", map[string]any{"content": "x", "messageId": id}),
			p.event(s.ID(), "assistant.message_delta", map[string]any{"messageId": "a", "deltaContent": text}),
			p.event(s.ID(), "assistant.message", map[string]any{"messageId": "a", "content": text}),
			p.event(s.ID(), "session.idle", map[string]any{}))
	}
	result := async(func() error {
		m, err := s.SendAndWait(testContext(t), Message{Prompt: "hi"})
		if err == nil && m.Content != "one" {
			err = fmt.Errorf("got %q", m.Content)
		}
		return err
	})
	p.wait("session.send", 1)
	turn("m1", "one")
	if err := await(t, "turn", result); err != nil {
		t.Fatal(err)
	}
	result = async(func() error {
		n := 0
		for e, err := range s.Ask(testContext(t), Message{Prompt: "hi"}) {
			if err != nil {
				return err
			}
			_ = e
			n++
		}
		if n != 4 {
			return fmt.Errorf("%d events", n)
		}
		return nil
	})
	p.wait("session.send", 2)
	turn("m2", "two")
	if err := await(t, "ask", result); err != nil {
		t.Fatal(err)
	}
	if err := s.Disconnect(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Send(testContext(t), Message{}); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	if err := c.Stop(context.Background()); err != nil {
		t.Fatal(err)
	}
}

func TestAgentErrorIsAuthentication(t *testing.T) {
	for _, tt := range []struct {
		name string
		err  AgentError
		want bool
	}{
		{"refused key", AgentError{Type: "authentication", StatusCode: 401}, true},
		{"refused key, other type", AgentError{Type: "query", StatusCode: 401}, true},
		{"no login", AgentError{Type: "query", Message: "Execution failed: InvalidArg, No GitHub OAuth token or Copilot HMAC key provided"}, true},
		{"other query", AgentError{Type: "query", Message: "Failed to get response from the AI model"}, false},
		{"quota", AgentError{Type: "quota", StatusCode: 429}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := errors.Is(&tt.err, ErrAuthentication); got != tt.want {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

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
	leakCheck(t)
	t.Cleanup(func() {
		if kids := spineKids(); len(kids) > 0 {
			t.Errorf("children left: %v", kids)
		}
	})
}

// spineRounds is how often a race is tried: a fortieth of n, a tenth of that with -short, unless COPILOT_TEST_ROUNDS asks for all.
func spineRounds(n int) int {
	switch {
	case os.Getenv("COPILOT_TEST_ROUNDS") == "all":
		return n
	case testing.Short():
		return max(1, n/400)
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

// A client without a process has nothing to kill and nothing to wait for.
func TestForcedStopWithoutProcess(t *testing.T) {
	leakCheck(t)
	c, _ := newPeer(t, nil)
	if state, err := c.ForceStopAndWait(testContext(t)); state != nil || err != nil {
		t.Errorf("got %v, %v", state, err)
	}
	f := c.StartForceStop()
	await(t, "outcome", f.Done())
	if c.PID() != 0 || f.PID() != 0 {
		t.Errorf("process numbers %d and %d", c.PID(), f.PID())
	}
	await(t, "client's end", c.Done())
	if err := c.Err(); err != ErrClosed {
		t.Errorf("Err is %v", err)
	}
}

// Nobody has to stop a client whose child ends: it is reaped all the same, also where it dies within a frame.
func TestDroppedClients(t *testing.T) {
	spineFlat(t)
	o := spineOptions(t, spineScript{On: map[string]string{"work": "raw Content-Length: 100\r\n\r\n{\"jsonrpc\"", "leave": "exit 3"}})
	for range 5 {
		c, err := Start(testContext(t), o)
		if err != nil {
			t.Fatal(err)
		}
		torn := async(func() error { return c.Call(testContext(t), "work", nil, nil) })
		left := async(func() error { return c.Call(testContext(t), "leave", nil, nil) })
		var exit *ExitError
		for _, call := range []<-chan error{torn, left} {
			if err := await(t, "call", call); !errors.As(err, &exit) || exit.State.ExitCode() != 3 {
				t.Errorf("got %v", err)
			}
		}
		await(t, "client's end", c.Done())
	}
}

// A Stop that was given up gives nothing up: the forced stop still reaches the child, and all of them have one outcome.
func TestForcedStopAfterCancelledStop(t *testing.T) {
	spineFlat(t)
	c := spineStart(t, spineOptions(t, spineScript{IgnoreEOF: true, IgnoreTERM: true, On: map[string]string{"runtime.shutdown": "silent"}}))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := c.Stop(ctx); err != nil && !errors.Is(err, ErrNotConfirmed) {
		t.Errorf("Stop: %v", err)
	}
	var outcomes []<-chan error
	states := make(chan *os.ProcessState, 16)
	for range cap(states) {
		outcomes = append(outcomes, async(func() error {
			state, err := c.ForceStopAndWait(testContext(t))
			states <- state
			return err
		}))
	}
	first := await(t, "state", states)
	if first == nil || first.Success() {
		t.Errorf("the child ended with %v", first)
	}
	for range cap(states) - 1 {
		if state := await(t, "state", states); state != first {
			t.Errorf("states differ: %v and %v", state, first)
		}
	}
	for _, outcome := range outcomes {
		if err := await(t, "outcome", outcome); err != nil {
			t.Error(err)
		}
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
	run := func(t *testing.T, c *Client, arrived func(), end func(), is func(error) bool) {
		t.Helper()
		s := createSession(t, c, nil)
		sub := s.Subscribe()
		var calls []<-chan error
		for range inFlight {
			calls = append(calls, async(func() error { return c.Call(testContext(t), "work", nil, nil) }))
		}
		arrived()
		end()
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
			kill(t, c.PID())
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
			end, want := func() { conn.CloseWrite() }, error(io.ErrUnexpectedEOF)
			if how == "reset" {
				end, want = func() { conn.SetLinger(0); conn.Close() }, syscall.ECONNRESET
			}
			run(t, c, func() { p.wait("work", inFlight) }, end, func(err error) bool { return errors.Is(err, want) })
		})
	}
}

func TestCase021ChildDiesUnasked(t *testing.T) {
	for _, tcp := range []bool{false, true} {
		spineFlat(t)
		c := spineStart(t, spineOptions(t, spineScript{TCP: tcp}))
		s := createSession(t, c, nil)
		seq := s.Events(context.Background())
		kill(t, c.PID())
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
	if host, port, err := net.SplitHostPort(c.Addr()); err != nil || host != "127.0.0.1" || port == "0" {
		t.Errorf("Addr %q", c.Addr())
	}
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
	if c.Err() != nil || isClosed(c.Done()) || c.Addr() != "" {
		t.Error("ended before its end, or has an address")
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
	p.handle("work", func(*peer, peerMessage) any { return noAnswer })
	pending := async(func() error { return c.Call(testContext(t), "work", nil, nil) })
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
	// The names of methods and members take another path than values.
	if got := string(appendQuoted(nil, "<é>&\"")); got != `"<é>&\""` {
		t.Errorf("quoted as %s", got)
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

// TestCallsOfADeletedSession is about calls in flight when the session goes and the connection stays.
func TestCallsOfADeletedSession(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	for _, method := range []string{"work", "session.send"} {
		p.handle(method, func(*peer, peerMessage) any { return noAnswer })
	}
	call := async(func() error { return s.Call(testContext(t), "work", nil, nil) })
	turn := async(func() error { _, err := s.SendAndWait(testContext(t), Message{Prompt: "hi"}); return err })
	p.wait("work", 1)
	p.wait("session.send", 1)
	p.send(notification("session.lifecycle", map[string]any{"type": "session.deleted", "sessionId": s.ID()}))
	for what, result := range map[string]<-chan error{"call": call, "turn": turn} {
		if err := await(t, what, result); !errors.Is(err, ErrSessionNotFound) {
			t.Errorf("%s: %v", what, err)
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

// recordedKinds returns the first recorded message of each kind that a server sends, as of a session "s".
func recordedKinds(t testing.TB) (messages [][]byte) {
	seen := make(map[string]bool)
	for _, line := range readTranscripts(t) {
		var m message
		if line.Dir != "s2c" || !m.parse(line.Msg) {
			continue
		}
		kind := unquote(m.method) + " " + unquote(m.fields.typ)
		if m.method == nil || seen[kind] {
			continue
		}
		seen[kind] = true
		if m.sessionID != nil {
			line.Msg = bytes.ReplaceAll(line.Msg, m.sessionID, []byte(`"s"`))
		}
		messages = append(messages, line.Msg)
	}
	if len(messages) < 10 {
		t.Fatalf("only %d kinds of messages are recorded", len(messages))
	}
	return messages
}

func FuzzMessage(f *testing.F) {
	for _, s := range spineMessages {
		f.Add([]byte(s))
	}
	for _, m := range recordedKinds(f) {
		f.Add(m)
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
			var text string
			if want[0] == '"' && (json.Unmarshal(want, &text) != nil || unquote(want) != text) {
				t.Errorf("unquoted to %q, encoding/json says %q", unquote(want), text)
			}
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
	for _, m := range recordedKinds(f) {
		f.Add(m, m, encodeFrame(json.RawMessage(m)))
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
		if !poll(testContext(t), func() bool { return runtime.NumGoroutine() <= before }) {
			buf := make([]byte, 1<<16)
			t.Fatalf("goroutines left:\n%s", buf[:runtime.Stack(buf, true)])
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
			if err := b.c.conn.reply([]byte("0"), nil, nil); err != nil {
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
						if err := b.c.conn.reply([]byte("0"), nil, nil); err != nil {
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

// serveWatch makes the peer accept watches under the given id, with these messages in the same write as the answer.
func serveWatch(p *peer, id string, replay func() []any) {
	p.handle("sessions.watch", func(p *peer, m peerMessage) any {
		all := []any{map[string]any{"jsonrpc": "2.0", "id": m.ID, "result": map[string]any{
			"sessionId": id, "readOnly": true, "metadata": map[string]any{"sessionId": id, "kind": "remote-session"}}}}
		if replay != nil {
			all = append(all, replay()...)
		}
		p.send(all...)
		return noAnswer
	})
}

func disconnected(id string) map[string]any {
	return notification("session.lifecycle", map[string]any{"type": "session.disconnected", "sessionId": id})
}

// watch begins a watch that must succeed.
func watch(t testing.TB, c *Client, id string, opts *WatchOptions) *SharedSessionWatch {
	t.Helper()
	w, err := c.WatchSharedSession(testContext(t), id, opts)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// collect ranges a watch to its end and returns the events' types, the lag reported, and the last error.
func collect(t testing.TB, w *SharedSessionWatch) (events []Event, skipped uint64, last error) {
	t.Helper()
	for e, err := range w.Events(testContext(t)) {
		var lag *LagError
		switch {
		case errors.As(err, &lag):
			skipped += lag.Skipped
		case err != nil:
			last = err
		default:
			events = append(events, e)
		}
	}
	return events, skipped, last
}

// expectClosed compares the ids of all sessions.close so far, and checks that nothing was destroyed.
func expectClosed(t testing.TB, c *Client, p *peer, want ...string) {
	t.Helper()
	if got := released(t, c, p, "sessions.close"); !slices.Equal(got, want) {
		t.Errorf("closed %q, want %q", got, want)
	}
	for _, method := range []string{"session.destroy", "session.delete"} {
		if n := len(p.calls(method)); n != 0 {
			t.Errorf("%d of %s", n, method)
		}
	}
}

func TestWatchRequestAndMetadata(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	p.handle("sessions.watch", func(p *peer, m peerMessage) any {
		return json.RawMessage(`{"sessionId":"assigned","readOnly":true,"later":1,"metadata":{"sessionId":"assigned","kind":"coding-agent","name":"N","summary":"S",
			"startTime":"2026-01-02T03:04:05.678Z","modifiedTime":"2026-01-02T04:04:05Z","repository":{"owner":"o","name":"n","branch":"b"},
			"pullRequestNumber":7,"resourceId":"r","staleAt":"never","state":"running","unknown":[]}}`)
	})
	w := watch(t, c, "wanted", nil)
	if m := p.wait("sessions.watch", 1); string(m.Params) != `{"sessionId":"wanted"}` {
		t.Errorf("params %s", m.Params)
	}
	want := RemoteSessionMetadata{
		SessionID: "assigned", Kind: "coding-agent", Name: "N", Summary: "S",
		StartTime: time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.UTC), ModifiedTime: time.Date(2026, 1, 2, 4, 4, 5, 0, time.UTC),
		Repository: RemoteRepository{"o", "n", "b"}, PullRequestNumber: 7, ResourceID: "r", StaleAt: "never", State: "running",
	}
	if got := w.Metadata(); got != want {
		t.Errorf("got %+v", got)
	}
	if w.SessionID() != "assigned" || !w.ReadOnly() {
		t.Errorf("%q %v", w.SessionID(), w.ReadOnly())
	}
	expectRoutes(t, c, "assigned")
	if err := w.Close(testContext(t)); err != nil {
		t.Error(err)
	}
	expectClosed(t, c, p, "assigned")
	expectRoutes(t, c)
}

// TestWatchHasNoWayToAct lists what a watch can do. Comparable metadata holds nothing that is shared.
func TestWatchHasNoWayToAct(t *testing.T) {
	typ := reflect.TypeFor[*SharedSessionWatch]()
	var got []string
	for i := 0; i < typ.NumMethod(); i++ {
		got = append(got, typ.Method(i).Name)
	}
	if want := []string{"Close", "Events", "Metadata", "ReadOnly", "SessionID"}; !slices.Equal(got, want) {
		t.Errorf("methods %q, want %q", got, want)
	}
	for i := 0; i < typ.Elem().NumField(); i++ {
		if f := typ.Elem().Field(i); f.IsExported() || f.Anonymous {
			t.Errorf("field %s can be reached", f.Name)
		}
	}
	var plain func(typ reflect.Type)
	plain = func(typ reflect.Type) {
		for i := 0; i < typ.NumField(); i++ {
			switch f := typ.Field(i); {
			case f.Type == reflect.TypeFor[time.Time]():
			case f.Type.Kind() == reflect.Struct:
				plain(f.Type)
			case f.Type.Kind() != reflect.String && f.Type.Kind() != reflect.Int:
				t.Errorf("metadata field %s is a %s", f.Name, f.Type)
			}
		}
	}
	plain(reflect.TypeFor[RemoteSessionMetadata]())
}

// TestCase007WatchIsPassive replays in the same write as the answer, asks for answers, then goes on live.
func TestCase007WatchIsPassive(t *testing.T) {
	leakCheck(t)
	answered := func(ctx context.Context, method string, params json.RawMessage) (any, error) {
		t.Errorf("%s was handled", method)
		return nil, nil
	}
	c, p := newPeer(t, nil)
	createSession(t, c, &SessionConfig{SessionID: "mine", Handlers: map[string]HandlerFunc{"canvas.open": answered}})
	const id = "theirs"
	serveWatch(p, id, func() (all []any) {
		all = append(all, p.event("requested", "of nobody", nil))
		for i := 0; i < 10; i++ {
			all = append(all, p.event(id, "replayed", i))
		}
		for i, typ := range []string{"permission.requested", "external_tool.requested", "elicitation.requested", "user_input.requested", "command.execute", "mcp.oauth_required"} {
			all = append(all, p.event(id, typ, map[string]any{"requestId": fmt.Sprint("r", i), "toolName": "t", "toolCallId": "c"}))
		}
		return all
	})
	w := watch(t, c, "requested", nil)
	for _, method := range []string{"canvas.open", "userInput.request", "hooks.invoke"} {
		if m := p.request(method, map[string]any{"sessionId": id}); m.Error == nil {
			t.Errorf("%s was answered with %s", method, m.Result)
		}
	}
	p.send(p.event(id, "live", 10), p.event(id, "live", 11), disconnected(id))
	events, skipped, last := collect(t, w)
	if len(events) != 18 || skipped != 0 || last != ErrDisconnected {
		t.Fatalf("%d events, %d skipped, %v", len(events), skipped, last)
	}
	for i, e := range append(slices.Clone(events[:10]), events[16:]...) {
		if string(e.Data) != fmt.Sprint(i) {
			t.Errorf("event %d is %s", i, e.Data)
		}
	}
	if err := c.Stop(testContext(t)); err != nil {
		t.Error(err)
	}
	var got []string
	for _, m := range p.calls("") {
		got = append(got, m.Method)
	}
	if want := []string{"connect", "session.create", "sessions.watch", "session.destroy"}; !slices.Equal(got, want) {
		t.Errorf("requests %q, want %q", got, want)
	}
}

// TestCase076WatchLeavesRequestsPending checks it for a client that would answer in a session of its own.
func TestCase076WatchLeavesRequestsPending(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	createSession(t, c, &SessionConfig{SessionID: "mine", OnPermission: func(context.Context, PermissionRequest) (PermissionDecision, error) {
		t.Error("asked")
		return PermissionDecision{}, nil
	}})
	serveWatch(p, "theirs", nil)
	w := watch(t, c, "theirs", nil)
	p.send(p.event("theirs", "permission.requested", map[string]any{"requestId": "r", "permissionRequest": map[string]any{"kind": "shell"}}), disconnected("theirs"))
	if events, _, last := collect(t, w); len(events) != 1 || last != ErrDisconnected {
		t.Errorf("%d events, %v", len(events), last)
	}
	p.sync()
	if n := len(p.calls("")); n != 3 {
		t.Errorf("%d requests", n)
	}
}

// TestCase006TwoClients has one client drive a session and another watch it.
func TestCase006TwoClients(t *testing.T) {
	leakCheck(t)
	a, pa := newPeer(t, nil)
	b, pb := newPeer(t, nil)
	s := createSession(t, a, &SessionConfig{SessionID: "s"})
	driver := s.Subscribe()
	serveWatch(pb, "s", nil)
	w := watch(t, b, "s", nil)
	var watcher []Event
	for i := 0; i < 20; i++ {
		e := pa.event("s", "n", i, "ephemeral", i%2 == 0)
		pa.send(e)
		pb.send(e)
	}
	for e, err := range w.Events(testContext(t)) {
		if err != nil {
			t.Fatal(err)
		}
		if watcher = append(watcher, e); len(watcher) == 20 {
			break
		}
	}
	for i, want := range watcher {
		if got := next(t, driver); !reflect.DeepEqual(got, want) {
			t.Errorf("%d: driver %+v, watcher %+v", i, got, want)
		}
	}
	if err := w.Close(testContext(t)); err != nil {
		t.Error(err)
	}
	expectClosed(t, b, pb, "s")
	if _, err := s.Send(testContext(t), Message{Prompt: "x"}); err != nil {
		t.Errorf("the driver: %v", err)
	}
}

// TestWatchReplay reads a long replay late, with rings that are large enough, the default, and small.
func TestWatchReplay(t *testing.T) {
	const n = 10000
	for _, test := range []struct{ buffer, size int }{{n, n}, {0, 8192}, {100, 100}} {
		leakCheck(t)
		c, p := newPeer(t, nil)
		serveWatch(p, "w", func() (all []any) {
			for i := 0; i < n; i++ {
				all = append(all, p.event("w", "n", i))
			}
			return all
		})
		w := watch(t, c, "w", &WatchOptions{EventBuffer: test.buffer})
		p.sync()
		i, skipped := 0, uint64(0)
		for e, err := range w.Events(testContext(t)) {
			var lag *LagError
			if errors.As(err, &lag) {
				if i != 0 {
					t.Errorf("gap after %d", i)
				}
				skipped += lag.Skipped
				i += int(lag.Skipped)
				continue
			}
			if err != nil || string(e.Data) != fmt.Sprint(i) {
				t.Fatalf("%d: %s %v", i, e.Data, err)
			}
			if i++; i == n {
				break
			}
		}
		if want := uint64(n - test.size); skipped != want {
			t.Errorf("buffer %d: skipped %d, want %d", test.buffer, skipped, want)
		}
		p.send(p.event("w", "live", nil), disconnected("w"))
		if events, _, last := collect(t, w); len(events) != 1 || last != ErrDisconnected { // a later range goes on
			t.Errorf("%d events, %v", len(events), last)
		}
	}
}

func TestWatchRefusedAnswers(t *testing.T) {
	var refusal *RPCError
	var decoding *json.UnmarshalTypeError
	is := func(want error) func(error) bool { return func(err error) bool { return errors.Is(err, want) } }
	for _, test := range []struct {
		name   string
		answer string
		check  func(error) bool
		closed []string
	}{
		{"not read-only", `{"sessionId":"w","readOnly":false,"metadata":{}}`, is(errNotReadOnly), []string{"w"}},
		{"nothing said", `{"sessionId":"w","metadata":{}}`, is(errNotReadOnly), []string{"w"}},
		{"a string", `{"sessionId":"w","readOnly":"true"}`, is(errNotReadOnly), []string{"w"}},
		{"other case", `{"sessionId":"w","READONLY":true}`, is(errNotReadOnly), []string{"w"}},
		{"metadata", `{"sessionId":"w","readOnly":true,"metadata":{"name":5}}`, func(err error) bool { return errors.As(err, &decoding) }, []string{"w"}},
		{"no id", `{"readOnly":true}`, func(err error) bool { return err != nil }, nil},
		{"no object", `5`, func(err error) bool { return err != nil }, nil},
		{"null", `null`, func(err error) bool { return err != nil }, nil},
		{"open here", `{"sessionId":"open","readOnly":true}`, is(ErrSessionOpen), nil},
		{"watched here", `{"sessionId":"watched","readOnly":true}`, is(ErrSessionOpen), nil},
		{"unknown method", "-32601", func(err error) bool { return errors.As(err, &refusal) && errors.Is(err, ErrNotSupported) }, nil},
		{"not found", "-32603", func(err error) bool { return errors.As(err, &refusal) && errors.Is(err, ErrSessionNotFound) }, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			leakCheck(t)
			c, p := newPeer(t, nil)
			sub := createSession(t, c, &SessionConfig{SessionID: "open"}).Subscribe()
			serveWatch(p, "watched", nil)
			watch(t, c, "watched", nil)
			p.handle("sessions.watch", func(p *peer, m peerMessage) any {
				if test.answer[0] == '-' {
					var code int
					_ = json.Unmarshal([]byte(test.answer), &code)
					return &peerError{Code: code, Message: "Session not found, or Unhandled method"}
				}
				return json.RawMessage(test.answer)
			})
			w, err := c.WatchSharedSession(testContext(t), "asked", nil)
			var s *SessionError
			if w != nil || !test.check(err) || !errors.As(err, &s) || s.SessionID != "asked" {
				t.Errorf("got %v", err)
			}
			expectClosed(t, c, p, test.closed...)
			expectRoutes(t, c, "open", "watched")
			p.emit("open", "x", nil)
			next(t, sub)
		})
	}
	c, p := newPeer(t, nil)
	for _, err := range []error{
		second(c.WatchSharedSession(testContext(t), "", nil)),
		second(c.WatchSharedSession(testContext(t), "w", &WatchOptions{EventBuffer: -1})),
	} {
		if !errors.Is(err, ErrInvalidConfig) {
			t.Errorf("got %v", err)
		}
	}
	if n := len(p.calls("")); n != 1 {
		t.Errorf("%d requests", n)
	}
}

// TestWatchOfTheRealCLI shows what today's CLI makes of a watch.
func TestWatchOfTheRealCLI(t *testing.T) {
	c := startReal(t, Options{})
	if _, err := c.WatchSharedSession(testContext(t), "some-session", nil); !errors.Is(err, ErrNotSupported) {
		t.Errorf("got %v", err)
	}
	expectRoutes(t, c)
}

func TestWatchClose(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	noMore := func(what string, w *SharedSessionWatch, want error) {
		t.Helper()
		if events, _, last := collect(t, w); len(events) != 1 || last != want {
			t.Errorf("%s: %d events, then %v", what, len(events), last)
		}
		if err := w.Close(testContext(t)); err != nil {
			t.Errorf("%s: close again: %v", what, err)
		}
		expectRoutes(t, c)
	}
	begin := func(id string) *SharedSessionWatch {
		serveWatch(p, id, func() []any { return []any{p.event(id, "x", nil)} })
		return watch(t, c, id, nil)
	}

	w := begin("before")
	if err := w.Close(testContext(t)); err != nil {
		t.Error(err)
	}
	p.send(p.event("before", "x", nil), disconnected("before"))
	p.sync()
	noMore("close before", w, nil)

	w = begin("after")
	p.send(disconnected("after"))
	p.sync()
	expectRoutes(t, c)
	noMore("close after", w, ErrDisconnected)

	w = begin("during")
	p.handle("sessions.close", func(*peer, peerMessage) any { return noAnswer })
	closing := []<-chan error{
		async(func() error { return w.Close(testContext(t)) }),
		async(func() error { return w.Close(testContext(t)) }),
	}
	request := p.wait("sessions.close", 2)
	p.send(disconnected("during"))
	p.sync()
	expectRoutes(t, c)
	p.answer(request.ID, map[string]any{})
	for _, done := range closing {
		if err := await(t, "close", done); err != nil {
			t.Error(err)
		}
	}
	noMore("close during", w, ErrDisconnected)

	w = begin("impatient")
	ctx, cancel := context.WithCancel(context.Background())
	closing[0] = async(func() error { return w.Close(ctx) })
	request = p.wait("sessions.close", 3)
	p.sync() // the event was read, which stood behind the answer to the watch
	cancel()
	expectFailure(t, await(t, "close", closing[0]), "impatient", context.Canceled)
	expectRoutes(t, c)
	closing[0] = async(func() error { return w.Close(testContext(t)) }) // waits for the same
	p.answer(request.ID, &peerError{Code: -32603, Message: "cannot"})
	var refusal *RPCError
	if err := await(t, "close", closing[0]); !errors.As(err, &refusal) {
		t.Errorf("got %v", err)
	}
	if events, _, last := collect(t, w); len(events) != 1 || last != nil {
		t.Errorf("%d events, then %v", len(events), last)
	}
	expectClosed(t, c, p, "before", "during", "impatient")
}

// TestWatchAwaitsRelease watches an id again, and starts it, while it is being closed.
func TestWatchAwaitsRelease(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	serveWatch(p, "w", nil)
	for n, again := range []func() error{
		func() error { return second(c.ResumeSession(testContext(t), "w", nil)) },
		func() error { return second(c.WatchSharedSession(testContext(t), "w", nil)) },
	} {
		w := watch(t, c, "w", nil)
		p.handle("sessions.close", func(*peer, peerMessage) any { return noAnswer })
		ctx, cancel := context.WithCancel(context.Background())
		left := async(func() error { return w.Close(ctx) })
		request := p.wait("sessions.close", n+1)
		cancel()
		await(t, "close", left)
		if err := second(c.WatchSharedSession(ctx, "w", nil)); !errors.Is(err, context.Canceled) { // does not wait longer than its ctx
			t.Errorf("got %v", err)
		}
		seen := len(p.calls(""))
		result := async(again)
		p.sync()
		p.handle("sessions.close", func(*peer, peerMessage) any { return map[string]any{} })
		if now := len(p.calls("")); now != seen {
			t.Errorf("written while the release was open")
		}
		p.answer(request.ID, map[string]any{})
		if err := await(t, "again", result); err != nil {
			t.Error(err)
		}
		if err := w.Close(testContext(t)); err != nil { // once more: the id is not its own any longer
			t.Error(err)
		}
		expectRoutes(t, c, "w")
		if n == 0 {
			c.mu.Lock()
			s := c.routes["w"].session
			c.mu.Unlock()
			if err := s.Disconnect(testContext(t)); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestWatchUnderAnIDBeingClosed is assigned an id whose earlier watch is still being closed. It must be closed by a request of its own.
func TestWatchUnderAnIDBeingClosed(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	serveWatch(p, "assigned", nil)
	first := watch(t, c, "a", nil)
	p.handle("sessions.close", func(*peer, peerMessage) any { return noAnswer })
	ctx, cancel := context.WithCancel(context.Background())
	left := async(func() error { return first.Close(ctx) })
	request := p.wait("sessions.close", 1)
	cancel()
	await(t, "close", left)
	w := watch(t, c, "b", nil)
	closed := async(func() error { return w.Close(testContext(t)) })
	until(t, "close", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return w.releasing != nil
	})
	p.handle("sessions.close", func(*peer, peerMessage) any { return map[string]any{} })
	p.answer(request.ID, map[string]any{})
	if err := await(t, "close", closed); err != nil {
		t.Error(err)
	}
	expectClosed(t, c, p, "assigned", "assigned")
}

// TestCancelledWatch answers a watch whose caller has gone.
func TestCancelledWatch(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	p.handle("sessions.watch", func(*peer, peerMessage) any { return noAnswer })
	ctx, cancel := context.WithCancelCause(context.Background())
	cause := errors.New("bored")
	result := async(func() error { return second(c.WatchSharedSession(ctx, "w", nil)) })
	request := p.wait("sessions.watch", 1)
	cancel(cause)
	err := await(t, "watch", result)
	expectFailure(t, err, "w", context.Canceled)
	expectFailure(t, err, "w", cause)
	p.answer(request.ID, map[string]any{"sessionId": "w", "readOnly": true})
	expectClosed(t, c, p, "w")
	expectRoutes(t, c)

	// The answer and the end at the same moment, half the time with both of them waiting for the client: either way it is closed once.
	for i := 2; i < 200; i++ {
		ctx, cancel := context.WithCancel(context.Background())
		var w *SharedSessionWatch
		result := async(func() (err error) {
			w, err = c.WatchSharedSession(ctx, "w", nil)
			return err
		})
		request := p.wait("sessions.watch", i)
		if i%2 == 0 {
			c.mu.Lock()
		}
		ended := async(func() error {
			if i%2 == 0 {
				runtime.Gosched() // so that the answer is first, often
			}
			cancel()
			return nil
		})
		p.answer(request.ID, map[string]any{"sessionId": "w", "readOnly": true})
		if i%2 == 0 {
			await(t, "cancel", ended)
			for range 10 {
				runtime.Gosched()
			}
			c.mu.Unlock()
		} else {
			await(t, "cancel", ended)
		}
		switch err := await(t, "watch", result); {
		case err == nil:
			if err := w.Close(testContext(t)); err != nil {
				t.Error(err)
			}
		case !errors.Is(err, context.Canceled):
			t.Error(err)
		}
		if got := len(released(t, c, p, "sessions.close")); got != i {
			t.Fatalf("round %d: closed %d times", i, got)
		}
		expectRoutes(t, c)
	}
}

// TestCancelledWatchThatIsRegistered is the moment in which the answer was handled and its caller has noticed its ctx only.
func TestCancelledWatchThatIsRegistered(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	w := &SharedSessionWatch{client: c, ring: newRing[Event](1)}
	w.sub = w.ring.subscribe()
	var abandoned bool
	if err := c.registerWatch(w, json.RawMessage(`{"sessionId":"w","readOnly":true}`), &abandoned); err != nil {
		t.Fatal(err)
	}
	expectRoutes(t, c, "w")
	w.discard(context.Canceled)
	expectClosed(t, c, p, "w")
	expectRoutes(t, c)
	expectEnd(t, w.sub, context.Canceled)
}

// TestStopRacesWithDisconnect never destroys a watch, and never closes one twice.
func TestStopRacesWithDisconnect(t *testing.T) {
	leakCheck(t)
	for i := 0; i < 1000; i++ {
		t.Run("", func(t *testing.T) { // so that each client ends before the next begins
			c, p := newPeer(t, nil)
			createSession(t, c, &SessionConfig{SessionID: "s"})
			serveWatch(p, "w", nil)
			w := watch(t, c, "w", nil)
			told := async(func() error { p.send(disconnected("w")); return nil })
			stopped := async(func() error { return c.Stop(testContext(t)) })
			if i%3 == 0 {
				if err := w.Close(testContext(t)); err != nil && !errors.Is(err, ErrClosed) {
					t.Error(err)
				}
			}
			if err := await(t, "stop", stopped); err != nil {
				t.Error(err)
			}
			await(t, "disconnect", told)
			await(t, "peer's end", p.ended)
			closed, destroyed := p.calls("sessions.close"), p.calls("session.destroy")
			if len(closed) > 1 || len(closed) == 1 && closed[0].get("sessionId") != "w" {
				t.Errorf("closed %v", closed)
			}
			if len(destroyed) != 1 || destroyed[0].get("sessionId") != "s" {
				t.Errorf("destroyed %v", destroyed)
			}
			if _, _, last := collect(t, w); last != nil && last != ErrDisconnected {
				t.Errorf("last pair %v", last)
			}
			expectRoutes(t, c)
		})
		if t.Failed() {
			return
		}
	}
}

// TestStopReleasesByKind, in good order and where a watch had disconnected before.
func TestStopReleasesByKind(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	createSession(t, c, &SessionConfig{SessionID: "s"})
	serveWatch(p, "gone", nil)
	gone := watch(t, c, "gone", nil)
	p.send(disconnected("gone"))
	p.sync()
	serveWatch(p, "w", func() []any { return []any{p.event("w", "x", nil)} })
	w := watch(t, c, "w", nil)
	p.refuse("sessions.close", -32603, "cannot")
	err := c.Stop(testContext(t))
	expectFailure(t, err, "w", ErrNotConfirmed)
	if n := len(p.calls("sessions.close")); n != 1 || p.calls("sessions.close")[0].get("sessionId") != "w" {
		t.Errorf("%d closes", n)
	}
	if n := len(p.calls("session.destroy")); n != 1 || p.calls("session.destroy")[0].get("sessionId") != "s" {
		t.Errorf("%d destroys", n)
	}
	if events, _, last := collect(t, w); len(events) != 1 || last != nil {
		t.Errorf("%d events, then %v", len(events), last)
	}
	if _, _, last := collect(t, gone); last != ErrDisconnected {
		t.Errorf("last pair %v", last)
	}
	for _, w := range []*SharedSessionWatch{w, gone} {
		_ = w.Close(testContext(t))
	}
	if err := second(c.WatchSharedSession(testContext(t), "w", nil)); !errors.Is(err, ErrClosed) {
		t.Errorf("after the stop: %v", err)
	}
}

// TestWatchAnswerMeetsStop lets the server grant a watch when Stop has begun.
func TestWatchAnswerMeetsStop(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	c.opts.StopGrace = patience
	createSession(t, c, &SessionConfig{SessionID: "s"})
	for _, method := range []string{"sessions.watch", "session.destroy"} {
		p.handle(method, func(*peer, peerMessage) any { return noAnswer })
	}
	result := async(func() error { return second(c.WatchSharedSession(testContext(t), "w", nil)) })
	request := p.wait("sessions.watch", 1)
	stopped := async(func() error { return c.Stop(testContext(t)) })
	destroy := p.wait("session.destroy", 1)
	p.answer(request.ID, map[string]any{"sessionId": "w", "readOnly": true})
	expectFailure(t, await(t, "watch", result), "w", ErrClosed)
	p.wait("sessions.close", 1)
	expectRoutes(t, c, "s")
	p.answer(destroy.ID, map[string]any{"success": true})
	if err := await(t, "stop", stopped); err != nil {
		t.Error(err)
	}
}

// TestWatchEndsWithTheConnection yields what came before.
func TestWatchEndsWithTheConnection(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	serveWatch(p, "w", func() []any { return []any{p.event("w", "x", nil)} })
	w := watch(t, c, "w", nil)
	p.sync()
	p.conn.Close()
	await(t, "client's end", c.Done())
	if events, _, last := collect(t, w); len(events) != 1 || !errors.Is(last, io.ErrUnexpectedEOF) {
		t.Errorf("%d events, then %v", len(events), last)
	}
	if err := w.Close(testContext(t)); err != nil {
		t.Errorf("close: %v", err)
	}
}

// TestWatchCtxBoundsTheCall cancels a watch's ctx once it has returned.
func TestWatchCtxBoundsTheCall(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	serveWatch(p, "w", nil)
	ctx, cancel := context.WithCancel(context.Background())
	w, err := c.WatchSharedSession(ctx, "w", nil)
	cancel()
	if err != nil {
		t.Fatal(err)
	}
	p.send(p.event("w", "x", nil), disconnected("w"))
	if events, _, last := collect(t, w); len(events) != 1 || last != ErrDisconnected {
		t.Errorf("%d events, then %v", len(events), last)
	}
}

func TestRawCloseEndsTheWatch(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	serveWatch(p, "w", nil)
	w := watch(t, c, "w", nil)
	if err := c.Call(testContext(t), "sessions.close", map[string]string{"sessionId": "w"}, nil); err != nil {
		t.Fatal(err)
	}
	expectRoutes(t, c)
	if err := w.Close(testContext(t)); err != nil {
		t.Error(err)
	}
	expectClosed(t, c, p, "w")
}

func TestLifecycle(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, &SessionConfig{SessionID: "s"})
	var subs []*Subscription[LifecycleEvent]
	for i := 0; i < 3; i++ {
		subs = append(subs, c.SubscribeLifecycle())
	}
	sequence := c.Lifecycle(testContext(t)) // before the watch, and ranged after it
	serveWatch(p, "w", func() []any { return []any{disconnected("w")} })
	w := watch(t, c, "w", nil)
	p.sync()
	expectRoutes(t, c, "s")
	serveWatch(p, "stays", nil)
	watch(t, c, "stays", nil)
	start := "2026-01-02T03:04:05.678Z"
	for _, params := range []any{
		map[string]any{"type": "session.created", "sessionId": "other", "metadata": map[string]any{"startTime": start, "modifiedTime": "broken", "summary": "S"}},
		map[string]any{"type": "session.dreaming", "sessionId": "other", "metadata": 5},
		map[string]any{"type": 5},
		map[string]any{"type": "session.disconnected", "sessionId": "s"}, // no watch
		map[string]any{"type": "session.updated", "sessionId": "s"},
		map[string]any{"type": "session.updated", "sessionId": "stays"},
		map[string]any{"type": "session.deleted", "sessionId": "stays"}, // its end is told as a disconnect
	} {
		p.send(notification("session.lifecycle", params))
	}
	p.sync()
	expectRoutes(t, c, "s", "stays")
	for range 2 { // the server says it twice
		p.send(notification("session.lifecycle", map[string]any{"type": "session.deleted", "sessionId": "s"}))
	}
	p.sync()
	expectRoutes(t, c, "stays")
	at, _ := time.Parse(time.RFC3339, start)
	want := []LifecycleEvent{
		{Type: SessionDisconnected, SessionID: "w"},
		{Type: SessionCreated, SessionID: "other", StartTime: at, Summary: "S"},
		{Type: "session.dreaming", SessionID: "other"},
		{},
		{Type: SessionDisconnected, SessionID: "s"},
		{Type: SessionUpdated, SessionID: "s"},
		{Type: SessionUpdated, SessionID: "stays"},
		{Type: SessionDeleted, SessionID: "stays"},
		{Type: SessionDeleted, SessionID: "s"},
		{Type: SessionDeleted, SessionID: "s"},
	}
	for i, e := range want {
		for _, sub := range subs {
			got, err := sub.Next(testContext(t))
			if err != nil || got != e {
				t.Errorf("%d: got %+v %v, want %+v", i, got, err, e)
			}
		}
	}
	if cause := context.Cause(s.Context()); !errors.Is(cause, ErrSessionNotFound) {
		t.Errorf("deleted session: %v", cause)
	}
	if _, _, last := collect(t, w); last != ErrDisconnected {
		t.Errorf("watch: %v", last)
	}
	i := 0
	for got, err := range sequence {
		if err != nil || got != want[i] {
			t.Errorf("sequence %d: %+v %v", i, got, err)
		}
		if i++; i == len(want) {
			break
		}
	}
	late := c.SubscribeLifecycle()
	if err := c.Stop(testContext(t)); err != nil {
		t.Error(err)
	}
	if _, err := late.Next(testContext(t)); err != io.EOF {
		t.Errorf("after Stop: %v", err)
	}
	if n := len(p.calls("sessions.close")) + len(p.calls("session.destroy")); n != 1 {
		t.Errorf("%d releases, want that of the one that is left", n)
	}
}

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
	leakCheck(t)
	t.Cleanup(func() {
		var left []int
		if !poll(testContext(t), func() bool { left = procFind(mark); return len(left) == 0 }) {
			t.Errorf("left: processes %v", left)
			for _, pid := range left {
				kill(t, pid)
			}
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
	if !poll(procCtx(t), func() bool { return slices.Contains(procLog(t, file), word) }) {
		t.Fatalf("no %s in the log: %v", word, procLog(t, file))
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
					kill(t, pid)
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
			case !errors.As(err, &listen) || len(listen.Output) > maxQuote || len(err.Error()) > 1024:
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
	for pad := maxQuote - 2*len(secret); pad < maxQuote+len(secret); pad++ {
		s := portScanner{secrets: []string{secret}}
		s.write([]byte(strings.Repeat(secret, 9)+strings.Repeat("-", pad-9*len(secret))+secret), false)
		if got := s.error().Output; strings.Contains(got, "01") || len(got) > maxQuote {
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
	if filepath.Base(filepath.Dir(cli)) == ".bin" { // the shim is what was named
		return map[string]string{"shim": cli}
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
	if !poll(procCtx(t), func() bool {
		return slices.ContainsFunc(procFind(mark), func(pid int) bool {
			comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
			return string(comm) == "sleep\n"
		})
	}) {
		t.Fatal("no command runs")
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
				if !poll(procCtx(t), func() bool { return len(procFind(procMarkOf(env))) == 0 }) {
					t.Fatal("still there")
				}
			})
		}
	}
}

// hdlLog is a logger's output that may be read while it is written.
type hdlLog struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *hdlLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *hdlLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// await returns the log as soon as it has text: what the reader logs goes aside.
func (l *hdlLog) await(t testing.TB, text string) string {
	t.Helper()
	for deadline := time.Now().Add(patience); !strings.Contains(l.String(), text); {
		if time.Now().After(deadline) {
			t.Fatalf("no %q in the log:\n%s", text, l.String())
		}
		runtime.Gosched()
	}
	return l.String()
}

func (l *hdlLog) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// hdlJSON returns raw with its members in order.
func hdlJSON(t testing.TB, raw []byte) string {
	t.Helper()
	var v any
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	if err := dec.Decode(&v); err != nil {
		t.Fatalf("%v in %q", err, raw)
	}
	b, _ := json.Marshal(v)
	return string(b)
}

// hdlOutcome is the answer to a direct request in one line.
func hdlOutcome(t testing.TB, m peerMessage) string {
	t.Helper()
	if m.Error != nil {
		return fmt.Sprintf("error %d %s%s", m.Error.Code, m.Error.Message, m.Error.Data)
	}
	return hdlJSON(t, m.Result)
}

// hdlStops are the ways in which a handler gives no result.
func hdlStops() map[string]func() error {
	return map[string]func() error{
		"error":    func() error { return errors.New("boom") },
		"panic":    func() error { panic("bang") },
		"panicErr": func() error { panic(errors.New("bang")) },
		"nilMap":   func() error { var m map[string]int; m["x"] = 1; return nil },
		"goexit":   func() error { runtime.Goexit(); return nil },
	}
}

// TestDirectRequests asks each question that comes as a request, with all that a host may do about it.
func TestDirectRequests(t *testing.T) {
	leakCheck(t)
	const section = `{"sections":{"tone":{"content":"polite"},"identity":{"content":"bot"}}}`
	const deny = `{"output":{"permissionDecision":"deny","permissionDecisionReason":%q}}`
	type tc struct {
		name, method, params, want string
		cfg                        SessionConfig
	}
	userInput := func(f func() (UserInputResponse, error)) SessionConfig {
		return SessionConfig{OnUserInput: func(context.Context, UserInputRequest) (UserInputResponse, error) { return f() }}
	}
	plan := func(f func() (ExitPlanModeResult, error)) SessionConfig {
		return SessionConfig{OnExitPlanMode: func(context.Context, ExitPlanModeRequest) (ExitPlanModeResult, error) { return f() }}
	}
	mode := func(f func() (AutoModeSwitchResponse, error)) SessionConfig {
		return SessionConfig{OnAutoModeSwitch: func(context.Context, AutoModeSwitchRequest) (AutoModeSwitchResponse, error) { return f() }}
	}
	preToolUse := func(out PreToolUseOutput) SessionConfig {
		return SessionConfig{Hooks: &Hooks{PreToolUse: func(context.Context, PreToolUseInput) (PreToolUseOutput, error) { return out, nil }}}
	}
	hook := func(f func() (any, error)) SessionConfig {
		return SessionConfig{OnHook: func(context.Context, HookCall) (any, error) { return f() }}
	}
	transform := func(f func() (string, error)) SessionConfig {
		return SessionConfig{Transforms: map[string]func(context.Context, string) (string, error){
			"tone": func(context.Context, string) (string, error) { return f() }}}
	}
	cases := []tc{
		{"no handler", "userInput.request", `{"question":"q"}`, `{"noResponse":true}`, SessionConfig{}},
		{"freeform", "userInput.request", `{"question":"q","choices":null}`, `{"answer":"a","wasFreeform":true}`,
			userInput(func() (UserInputResponse, error) { return UserInputResponse{Answer: "a"}, nil })},
		{"choice", "userInput.request", `{"question":"q","choices":["a","b"]}`, `{"answer":"a","wasFreeform":false}`,
			userInput(func() (UserInputResponse, error) { return UserInputResponse{Answer: "a"}, nil })},
		{"no question", "userInput.request", `{}`, `error -32602 params: question is missing`,
			userInput(func() (UserInputResponse, error) { panic("must not be asked") })},
		{"null question", "userInput.request", `{"question":null}`, `error -32602 params: question is missing`,
			userInput(func() (UserInputResponse, error) { panic("must not be asked") })},
		{"wrong shape", "userInput.request", `{"question":["q"]}`,
			`error -32602 params: json: cannot unmarshal array into Go struct field .question of type string`,
			userInput(func() (UserInputResponse, error) { panic("must not be asked") })},

		{"no handler", "exitPlanMode.request", `{"summary":"s"}`, `{"approved":true}`, SessionConfig{}},
		{"all", "exitPlanMode.request", `{"summary":"s"}`,
			`{"approved":true,"autoApproveEdits":true,"deferImplementation":true,"feedback":"f","selectedAction":"interactive"}`,
			plan(func() (ExitPlanModeResult, error) {
				return ExitPlanModeResult{true, "interactive", "f", true, true}, nil
			})},
		{"zero", "exitPlanMode.request", `{"summary":"s"}`, `{"approved":false}`, plan(func() (r ExitPlanModeResult, err error) { return })},
		{"error beside an approval", "exitPlanMode.request", `{}`, `{"approved":false}`,
			plan(func() (ExitPlanModeResult, error) { return ExitPlanModeResult{Approved: true}, errors.New("but") })},

		{"no handler", "autoModeSwitch.request", `{}`, `{"response":"no"}`, SessionConfig{}},
		{"always", "autoModeSwitch.request", `{}`, `{"response":"yes_always"}`, mode(func() (AutoModeSwitchResponse, error) { return AutoModeYesAlways, nil })},
		{"zero", "autoModeSwitch.request", `{}`, `{"response":"no"}`, mode(func() (AutoModeSwitchResponse, error) { return "", nil })},
		{"unknown", "autoModeSwitch.request", `{}`, `{"response":"no"}`, mode(func() (AutoModeSwitchResponse, error) { return "Yes", nil })},
		{"error beside yes", "autoModeSwitch.request", `{}`, `{"response":"no"}`, mode(func() (AutoModeSwitchResponse, error) { return AutoModeYes, io.EOF })},

		{"no handler", "hooks.invoke", `{"hookType":"preToolUse","input":{}}`, `{"output":{}}`, SessionConfig{}},
		{"no type", "hooks.invoke", `{"input":{}}`, `{"output":{}}`, hook(func() (any, error) { panic("must not be asked") })},
		{"nil", "hooks.invoke", `{"hookType":"preToolUse","input":{}}`, `{"output":{}}`, hook(func() (any, error) { return nil, nil })},
		{"map", "hooks.invoke", `{"hookType":"future","input":{}}`, `{"output":{"a":1}}`, hook(func() (any, error) { return map[string]int{"a": 1}, nil })},
		{"no object", "hooks.invoke", `{"hookType":"agentStop","input":{}}`, `{"output":{}}`, hook(func() (any, error) { return 7, nil })},
		{"no object", "hooks.invoke", `{"hookType":"preToolUse","input":{}}`,
			fmt.Sprintf(deny, "the host's handler gave no valid answer: the output is no object"), hook(func() (any, error) { return 7, nil })},
		{"unknown decision", "hooks.invoke", `{"hookType":"preToolUse","input":{}}`,
			fmt.Sprintf(deny, `the host's handler gave no valid answer: unknown decision "Deny"`), hook(func() (any, error) { return PreToolUseOutput{Decision: "Deny"}, nil })},
		{"zero", "hooks.invoke", `{"hookType":"preToolUse","input":{}}`,
			fmt.Sprintf(deny, "the host's handler gave no valid answer: zero decision"), preToolUse(PreToolUseOutput{})},
		{"pass", "hooks.invoke", `{"hookType":"preToolUse","input":{}}`, `{"output":{}}`, preToolUse(PreToolUseOutput{Decision: HookPass})},
		{"more than a decision", "hooks.invoke", `{"hookType":"preToolUse","input":{}}`, `{"output":{"additionalContext":"c"}}`,
			preToolUse(PreToolUseOutput{AdditionalContext: "c"})},
		{"no JSON", "hooks.invoke", `{"hookType":"preToolUse","input":{}}`,
			fmt.Sprintf(deny, "json: unsupported type: chan int"), hook(func() (any, error) { return make(chan int), nil })},

		{"no handler", "systemMessage.transform", section, section, SessionConfig{}},
		{"one", "systemMessage.transform", section, `{"sections":{"identity":{"content":"bot"},"tone":{"content":"rude"}}}`,
			transform(func() (string, error) { return "rude", nil })},
		{"no sections", "systemMessage.transform", `{}`, `error -32602 params: sections are missing`, SessionConfig{}},
		{"wrong shape", "systemMessage.transform", `{"sections":7}`,
			`error -32602 params: json: cannot unmarshal number into Go struct field .sections of type map[string]copilot.promptSection`, SessionConfig{}},
	}
	for name, stop := range hdlStops() {
		why := map[bool]string{true: "boom", false: "the host's handler panicked"}[name == "error"]
		cases = append(cases,
			tc{name, "userInput.request", `{"question":"q"}`, `{"noResponse":true}`, userInput(func() (r UserInputResponse, err error) { return r, stop() })},
			tc{name, "exitPlanMode.request", `{"summary":"s"}`, `{"approved":false}`, plan(func() (r ExitPlanModeResult, err error) { return r, stop() })},
			tc{name, "autoModeSwitch.request", `{}`, `{"response":"no"}`, mode(func() (r AutoModeSwitchResponse, err error) { return r, stop() })},
			tc{name, "hooks.invoke", `{"hookType":"preToolUse","input":{}}`, fmt.Sprintf(deny, why), hook(func() (any, error) { return nil, stop() })},
			tc{name, "hooks.invoke", `{"hookType":"postToolUse","input":{}}`, `{"output":{}}`, hook(func() (any, error) { return nil, stop() })},
			tc{name, "systemMessage.transform", section, section, transform(func() (string, error) { return "x", stop() })},
		)
	}
	c, p := newPeer(t, nil)
	for i, tc := range cases {
		t.Run(tc.method+"/"+tc.name, func(t *testing.T) {
			tc.cfg.SessionID = fmt.Sprint("s", i)
			createSession(t, c, &tc.cfg)
			params := splice(json.RawMessage(tc.params), "sessionId", tc.cfg.SessionID)
			if got := hdlOutcome(t, p.request(tc.method, params)); got != hdlWant(t, tc.want) {
				t.Errorf("answered %s\nwant %s", got, tc.want)
			}
		})
	}
	for _, params := range []string{`{}`, `{"sessionId":"nobody","question":"q"}`, `{"sessionId":7}`, `null`, `[]`} {
		if got, want := hdlOutcome(t, p.request("userInput.request", json.RawMessage(params))), "error -32602 no such session here"; got != want {
			t.Errorf("params %s: answered %s, want %s", params, got, want)
		}
	}
	if got, want := hdlOutcome(t, p.request("future.request", json.RawMessage(`{"sessionId":"s1"}`))), "error -32601 method not found: future.request"; got != want {
		t.Errorf("answered %s, want %s", got, want)
	}
}

func hdlWant(t testing.TB, want string) string {
	if strings.HasPrefix(want, "error") {
		return want
	}
	return hdlJSON(t, []byte(want))
}

// TestDirectRequestInputs checks what handlers of direct requests are told.
func TestDirectRequestInputs(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	got := make(chan any, 1)
	transform := func(_ context.Context, content string) (string, error) {
		got <- content
		return "", nil
	}
	createSession(t, c, &SessionConfig{SessionID: "s",
		OnUserInput: func(_ context.Context, r UserInputRequest) (UserInputResponse, error) {
			got <- r
			return UserInputResponse{}, nil
		},
		OnExitPlanMode: func(_ context.Context, r ExitPlanModeRequest) (ExitPlanModeResult, error) {
			got <- r
			return ExitPlanModeResult{}, nil
		},
		OnAutoModeSwitch: func(_ context.Context, r AutoModeSwitchRequest) (AutoModeSwitchResponse, error) {
			got <- r
			return AutoModeYes, nil
		},
		Transforms: map[string]func(context.Context, string) (string, error){"tone": transform},
		OnHook: func(_ context.Context, h HookCall) (any, error) {
			got <- fmt.Sprintf("%s %s %s", h.SessionID, h.Type, h.Input)
			return nil, nil
		},
	})
	for _, tc := range []struct {
		method, params string
		want           any
	}{
		{"userInput.request", `{"question":"q","choices":["a"],"allowFreeform":false}`, UserInputRequest{"s", "q", []string{"a"}, false}},
		{"userInput.request", `{"question":""}`, UserInputRequest{"s", "", nil, true}},
		{"exitPlanMode.request", `{"summary":"s","planContent":"# p","actions":["interactive"],"recommendedAction":"interactive"}`,
			ExitPlanModeRequest{"s", "s", "# p", []string{"interactive"}, "interactive"}},
		{"exitPlanMode.request", `{"summary":7,"actions":"all"}`, ExitPlanModeRequest{SessionID: "s", RecommendedAction: "autopilot"}},
		{"autoModeSwitch.request", `{"errorCode":"rate_limited","retryAfterSeconds":1.5}`, AutoModeSwitchRequest{"s", "rate_limited", 1500 * time.Millisecond}},
		{"autoModeSwitch.request", `{"retryAfterSeconds":-1e400}`, AutoModeSwitchRequest{SessionID: "s"}},
		{"systemMessage.transform", `{"sections":{"tone":{"content":"polite"}}}`, "polite"},
		{"hooks.invoke", `{"hookType":"future","input":{"n":12345678901234567890}}`, `s future {"n":12345678901234567890}`},
	} {
		p.request(tc.method, splice(json.RawMessage(tc.params), "sessionId", "s"))
		if got, want := fmt.Sprintf("%+v", await(t, tc.method, got)), fmt.Sprintf("%+v", tc.want); got != want {
			t.Errorf("%s %s: handler got %s, want %s", tc.method, tc.params, got, want)
		}
	}
}

// TestTypedHooks runs every hook that has a function of its own, in both directions.
func TestTypedHooks(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	got := make(chan string, 1)
	common := func(in HookInput) string {
		return fmt.Sprintf("%s %d %s %s %s %s", in.SessionID, in.Timestamp.UnixMilli(), in.CWD, in.AgentID, in.AgentType, in.ParentAgentID)
	}
	note := func(in HookInput, f string, a ...any) { got <- common(in) + " " + fmt.Sprintf(f, a...) }
	createSession(t, c, &SessionConfig{SessionID: "s", Hooks: &Hooks{
		PreToolUse: func(_ context.Context, in PreToolUseInput) (PreToolUseOutput, error) {
			note(in.HookInput, "%s %s", in.ToolName, in.ToolArgs)
			return PreToolUseOutput{HookAllow, "why", map[string]int{"a": 2}, "more", true}, nil
		},
		PreMCPToolCall: func(_ context.Context, in PreMCPToolCallInput) (PreMCPToolCallOutput, error) {
			note(in.HookInput, "%s %s %s %s %s", in.ServerName, in.ToolName, in.Arguments, in.ToolCallID, in.Meta)
			switch in.ToolName {
			case "remove":
				return PreMCPToolCallOutput{MetaToUse: json.RawMessage("null")}, nil
			case "replace":
				return PreMCPToolCallOutput{MetaToUse: json.RawMessage(`{"b":1}`)}, nil
			}
			return PreMCPToolCallOutput{}, nil
		},
		PostToolUse: func(_ context.Context, in PostToolUseInput) (PostToolUseOutput, error) {
			var r ToolResult
			if err := json.Unmarshal(in.ToolResult, &r); err != nil {
				return PostToolUseOutput{}, err
			}
			note(in.HookInput, "%s %s %s", in.ToolName, in.ToolArgs, r.Text)
			return PostToolUseOutput{ToolResult{Text: "new", SessionLog: "log"}, "more", true}, nil
		},
		PostToolUseFailure: func(_ context.Context, in PostToolUseFailureInput) (PostToolUseFailureOutput, error) {
			note(in.HookInput, "%s %s %s", in.ToolName, in.ToolArgs, in.Error)
			return PostToolUseFailureOutput{"more"}, nil
		},
		UserPromptSubmitted: func(_ context.Context, in UserPromptSubmittedInput) (UserPromptSubmittedOutput, error) {
			note(in.HookInput, "%s", in.Prompt)
			return UserPromptSubmittedOutput{"p", "more", true}, nil
		},
		UserPromptTransformed: func(_ context.Context, in UserPromptTransformedInput) (UserPromptTransformedOutput, error) {
			note(in.HookInput, "%s %s", in.Prompt, in.TransformedPrompt)
			return UserPromptTransformedOutput{"p"}, nil
		},
		SessionStart: func(_ context.Context, in SessionStartInput) (SessionStartOutput, error) {
			note(in.HookInput, "%s %s", in.Source, in.InitialPrompt)
			return SessionStartOutput{"more", struct{}{}}, nil
		},
		SessionEnd: func(_ context.Context, in SessionEndInput) (SessionEndOutput, error) {
			note(in.HookInput, "%s %s %s", in.Reason, in.FinalMessage, in.Error)
			return SessionEndOutput{true, []string{"a"}, "sum"}, nil
		},
		ErrorOccurred: func(_ context.Context, in ErrorOccurredInput) (ErrorOccurredOutput, error) {
			note(in.HookInput, "%s %s %s %v", in.ErrorName, in.ErrorMessage, in.ErrorContext, in.Recoverable)
			return ErrorOccurredOutput{true, "retry", 2, "oh"}, nil
		},
		AgentStop: func(_ context.Context, in AgentStopInput) (AgentStopOutput, error) {
			note(in.HookInput, "%s %s %v", in.StopReason, in.TranscriptPath, in.StopHookActive)
			return AgentStopOutput{"block", "go on"}, nil
		},
		SubagentStart: func(_ context.Context, in SubagentStartInput) error {
			note(in.HookInput, "%s %s", in.AgentName, in.TranscriptPath)
			return nil
		},
		SubagentStop: func(_ context.Context, in SubagentStopInput) error {
			note(in.HookInput, "%s %s %s %s %v", in.AgentName, in.TranscriptPath, in.StopReason, in.Response, in.StopHookActive)
			return nil
		},
	}})
	for _, tc := range []struct{ hook, input, told, want string }{
		{"preToolUse", `"toolName":"bash","toolArgs":{"n":12345678901234567890}`, `bash {"n":12345678901234567890}`,
			`{"permissionDecision":"allow","permissionDecisionReason":"why","modifiedArgs":{"a":2},"additionalContext":"more","suppressOutput":true}`},
		{"preMcpToolCall", `"serverName":"m","toolName":"keep","arguments":{},"toolCallId":"t","_meta":{"x":1}`, `m keep {} t {"x":1}`, `{}`},
		{"preMcpToolCall", `"serverName":"m","toolName":"remove"`, `m remove   `, `{"metaToUse":null}`},
		{"preMcpToolCall", `"serverName":"m","toolName":"replace"`, `m replace   `, `{"metaToUse":{"b":1}}`},
		{"postToolUse", `"toolName":"bash","toolArgs":[],"toolResult":{"textResultForLlm":"old","resultType":"success"}`, `bash [] old`,
			`{"modifiedResult":{"textResultForLlm":"new","sessionLog":"log"},"additionalContext":"more","suppressOutput":true}`},
		{"postToolUseFailure", `"toolName":"bash","toolArgs":{},"error":"e"`, `bash {} e`, `{"additionalContext":"more"}`},
		{"userPromptSubmitted", `"prompt":"hi"`, `hi`, `{"modifiedPrompt":"p","additionalContext":"more","suppressOutput":true}`},
		{"userPromptTransformed", `"prompt":"hi","transformedPrompt":"<x>hi"`, `hi <x>hi`, `{"modifiedTransformedPrompt":"p"}`},
		{"sessionStart", `"source":"new","initialPrompt":"hi"`, `new hi`, `{"additionalContext":"more","modifiedConfig":{}}`},
		{"sessionEnd", `"reason":"complete","finalMessage":"bye"`, `complete bye `, `{"suppressOutput":true,"cleanupActions":["a"],"sessionSummary":"sum"}`},
		{"errorOccurred", `"error":"text","errorContext":"model_call","recoverable":true`, ` text model_call true`,
			`{"suppressOutput":true,"errorHandling":"retry","retryCount":2,"userNotification":"oh"}`},
		{"errorOccurred", `"error":{"name":"E","message":"m","stack":"s"}`, `E m  false`,
			`{"suppressOutput":true,"errorHandling":"retry","retryCount":2,"userNotification":"oh"}`},
		{"agentStop", `"stopReason":"end_turn","transcriptPath":"/t","stop_hook_active":true`, `end_turn /t true`, `{"decision":"block","reason":"go on"}`},
		{"subagentStart", `"agentName":"n","transcriptPath":"/t"`, `n /t`, `{}`},
		{"subagentStop", `"agentName":"n","transcriptPath":"/t","stopReason":"end","response":"r","stop_hook_active":false`, `n /t end "r" false`, `{}`},
	} {
		input := `{"sessionId":"sub","timestamp":1796072928843.5,"cwd":"/w","agentId":"a","agentType":"b","parentAgentId":"c",` + tc.input + `}`
		params := json.RawMessage(fmt.Sprintf(`{"sessionId":"s","hookType":%q,"input":%s}`, tc.hook, input))
		answer := hdlOutcome(t, p.request("hooks.invoke", params))
		if got, want := await(t, tc.hook, got), "sub 1796072928843 /w a b c "+tc.told; got != want {
			t.Errorf("%s was told %q, want %q", tc.hook, got, want)
		}
		if want := hdlJSON(t, []byte(`{"output":`+tc.want+`}`)); answer != want {
			t.Errorf("%s answered %s, want %s", tc.hook, answer, want)
		}
	}
	// Input that does not fit must not let a guarded tool pass.
	params := json.RawMessage(`{"sessionId":"s","hookType":"preToolUse","input":{"toolName":7}}`)
	if got := hdlOutcome(t, p.request("hooks.invoke", params)); !strings.Contains(got, `"permissionDecision":"deny"`) {
		t.Errorf("preToolUse with bad input answered %s", got)
	}
	params = json.RawMessage(`{"sessionId":"s","hookType":"postToolUseFailure","input":{"toolName":7}}`)
	if got, want := hdlOutcome(t, p.request("hooks.invoke", params)), `{"output":{}}`; got != want {
		t.Errorf("postToolUseFailure with bad input answered %s, want %s", got, want)
	}
}

func TestCase079UnknownHook(t *testing.T) {
	leakCheck(t)
	var log hdlLog
	c, p := newPeer(t, &Options{Logger: log.logger()})
	createSession(t, c, &SessionConfig{SessionID: "s", Hooks: &Hooks{PreToolUse: func(context.Context, PreToolUseInput) (PreToolUseOutput, error) {
		panic("another hook was called")
	}}})
	params := json.RawMessage(`{"sessionId":"s","hookType":"futureHook","input":{"a":1}}`)
	if got, want := hdlOutcome(t, p.request("hooks.invoke", params)), `{"output":{}}`; got != want {
		t.Errorf("answered %s, want %s", got, want)
	}
	text := log.await(t, "futureHook")
	if n := strings.Count(text, "futureHook"); n != 1 || !strings.Contains(text, "level=DEBUG") {
		t.Errorf("%d lines name the hook:\n%s", n, text)
	}
}

const (
	hdlTool       = "session.tools.handlePendingToolCall"
	hdlPermission = "session.permissions.handlePendingPermissionRequest"
	hdlElicit     = "session.ui.handlePendingElicitation"
	hdlCommand    = "session.commands.handlePendingCommand"
	hdlOAuth      = "session.mcp.oauth.handlePendingRequest"
	hdlSampling   = "session.ui.handlePendingSampling"
)

func hdlToolConfig(f func(ctx context.Context, call ToolCall) (ToolResult, error)) SessionConfig {
	return SessionConfig{Tools: []Tool{{Name: "t", Handler: f}, {Name: "declared"}}}
}

func hdlDecide(f func() (PermissionDecision, error)) SessionConfig {
	return SessionConfig{OnPermission: func(context.Context, PermissionRequest) (PermissionDecision, error) { return f() }}
}

// TestBroadcastAnswers asks each question that comes as an event, with all that a host may do about it, and compares the call that answers.
// Covers cases 070, 071, 075, 080 and 081.
func TestBroadcastAnswers(t *testing.T) {
	leakCheck(t)
	type tc struct {
		name   string
		event  EventType
		data   string
		method string
		want   string // the answer's params besides both ids
		cfg    SessionConfig
	}
	const called = `"toolName":"t","toolCallId":"c"`
	result := func(r ToolResult) SessionConfig {
		return hdlToolConfig(func(context.Context, ToolCall) (ToolResult, error) { return r, nil })
	}
	typed := func(tool Tool) SessionConfig { return SessionConfig{Tools: []Tool{tool}} }
	elicit := func(f func() (ElicitationResult, error)) SessionConfig {
		return SessionConfig{OnElicitation: func(context.Context, ElicitationRequest) (ElicitationResult, error) { return f() }}
	}
	command := func(f func() error) SessionConfig {
		return SessionConfig{Commands: []Command{{Name: "deploy", Handler: func(context.Context, CommandCall) error { return f() }}}}
	}
	auth := func(f func() (*MCPAuthToken, error)) SessionConfig {
		return SessionConfig{OnMCPAuth: func(context.Context, MCPAuthRequest) (*MCPAuthToken, error) { return f() }}
	}
	sampling := func(f func() (any, error)) SessionConfig {
		return SessionConfig{OnSampling: func(context.Context, SamplingRequest) (any, error) { return f() }}
	}
	decide := func(d PermissionDecision) SessionConfig {
		return hdlDecide(func() (PermissionDecision, error) { return d, nil })
	}
	shell := `"permissionRequest":{"kind":"shell"}`
	url := `"permissionRequest":{"kind":"url"}`
	failed := func(text string) string {
		return fmt.Sprintf(`{"result":{"textResultForLlm":%q,"resultType":"failure","error":%q}}`, text, text)
	}
	unavailable := `{"result":{"kind":"user-not-available"}}`
	type answer struct {
		N int    `json:"n"`
		S string `json:"s"`
	}
	cases := []tc{
		{"Case070 zero", EventExternalToolRequested, called, hdlTool, `{"result":""}`, result(ToolResult{})},
		{"text", EventExternalToolRequested, called, hdlTool, `{"result":"<ok> & ü"}`, result(ToolResult{Text: "<ok> & ü"})},
		{"everything", EventExternalToolRequested, called, hdlTool, `{"result":{"textResultForLlm":"x","resultType":"success","sessionLog":"log",
			"toolTelemetry":{"metrics":{"n":1}},"binaryResultsForLlm":[{"type":"image","data":"AQI=","mimeType":"image/png"}],
			"contents":[{"type":"text","text":"x"}],"toolReferences":["other"]}}`,
			result(ToolResult{Text: "x", Type: ToolSuccess, SessionLog: "log", Telemetry: map[string]any{"metrics": map[string]int{"n": 1}},
				Binary: []ToolBinary{NewToolBinary("image/png", []byte{1, 2})}, Contents: []ToolContent{{Type: "text", Text: "x"}}, References: []string{"other"}})},
		{"failure", EventExternalToolRequested, called, hdlTool, failed("broken"), result(ToolResult{Type: ToolFailure, Error: "broken"})},
		{"error without type", EventExternalToolRequested, called, hdlTool, failed("broken"), result(ToolResult{Error: "broken"})},
		{"denied", EventExternalToolRequested, called, hdlTool, `{"result":{"textResultForLlm":"no","resultType":"denied"}}`, result(ToolResult{Text: "no", Type: ToolDenied})},
		{"unknown type", EventExternalToolRequested, called, hdlTool, failed(`the host's handler gave no valid answer: unknown tool result type "failed"`),
			result(ToolResult{Text: "x", Type: "failed"})},
		{"no encoding", EventExternalToolRequested, called, hdlTool, failed("the server did not accept the host's answer"),
			result(ToolResult{Telemetry: map[string]any{"x": make(chan int)}})},
		{"no call id", EventExternalToolRequested, `"toolName":"t"`, hdlTool, failed("the request has no toolCallId"), result(ToolResult{Text: "x"})},
		{"odd call id", EventExternalToolRequested, `"toolName":"t","toolCallId":7`, hdlTool, failed("the request has no toolCallId"), result(ToolResult{Text: "x"})},

		{"Case070 typed struct", EventExternalToolRequested, called, hdlTool, `{"result":"{\"n\":1,\"s\":\"<\"}"}`,
			typed(NewTool("t", "", func(context.Context, struct{}) (answer, error) { return answer{1, "<"}, nil }))},
		{"typed string", EventExternalToolRequested, called, hdlTool, `{"result":"plain"}`, typed(NewTool("t", "", func(context.Context, struct{}) (string, error) { return "plain", nil }))},
		{"typed empty string", EventExternalToolRequested, called, hdlTool, `{"result":""}`, typed(NewTool("t", "", func(context.Context, struct{}) (string, error) { return "", nil }))},
		{"typed bytes", EventExternalToolRequested, called, hdlTool, `{"result":"plain"}`, typed(NewTool("t", "", func(context.Context, struct{}) ([]byte, error) { return []byte("plain"), nil }))},
		{"Case070 typed binary", EventExternalToolRequested, called, hdlTool,
			`{"result":{"textResultForLlm":"","binaryResultsForLlm":[{"type":"resource","data":"/w==","mimeType":"application/octet-stream"}]}}`,
			typed(NewTool("t", "", func(context.Context, struct{}) ([]byte, error) { return []byte{255}, nil }))},
		{"typed map", EventExternalToolRequested, called, hdlTool, `{"result":"{\"a\":1}"}`, typed(NewTool("t", "", func(context.Context, struct{}) (map[string]int, error) { return map[string]int{"a": 1}, nil }))},
		{"typed nil map", EventExternalToolRequested, called, hdlTool, `{"result":""}`, typed(NewTool("t", "", func(context.Context, struct{}) (map[string]int, error) { return nil, nil }))},
		{"typed nil any", EventExternalToolRequested, called, hdlTool, `{"result":""}`, typed(NewTool("t", "", func(context.Context, struct{}) (any, error) { return nil, nil }))},
		{"typed nil result", EventExternalToolRequested, called, hdlTool, `{"result":""}`, typed(NewTool("t", "", func(context.Context, struct{}) (*ToolResult, error) { return nil, nil }))},
		{"typed result", EventExternalToolRequested, called, hdlTool, failed("no"), typed(NewTool("t", "", func(context.Context, struct{}) (*ToolResult, error) { return &ToolResult{Error: "no"}, nil }))},
		{"typed raw", EventExternalToolRequested, called, hdlTool, `{"result":"[1]"}`, typed(NewTool("t", "", func(context.Context, struct{}) (json.RawMessage, error) { return json.RawMessage("[1]"), nil }))},
		{"typed channel", EventExternalToolRequested, called, hdlTool, failed("json: unsupported type: chan int"), typed(NewTool("t", "", func(context.Context, struct{}) (chan int, error) { return make(chan int), nil }))},
		{"Case072 typed list for object", EventExternalToolRequested, called + `,"arguments":[]`, hdlTool,
			failed("arguments of t: json: cannot unmarshal array into Go value of type struct {}"), typed(NewTool("t", "", func(context.Context, struct{}) (string, error) { return "no", nil }))},
		{"Case072 typed text for object", EventExternalToolRequested, called + `,"arguments":"{}"`, hdlTool,
			failed("arguments of t: json: cannot unmarshal string into Go value of type struct {}"), typed(NewTool("t", "", func(context.Context, struct{}) (string, error) { return "no", nil }))},
		{"typed digits", EventExternalToolRequested, called + `,"arguments":{"id":12345678901234567890,"any":1.10}`, hdlTool, `{"result":"12345678901234567890 1.10"}`,
			typed(NewTool("t", "", func(_ context.Context, in struct {
				ID  uint64 `json:"id"`
				Any any    `json:"any"`
			}) (string, error) {
				return fmt.Sprint(in.ID, " ", in.Any), nil
			}))},

		{"Case075 once", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"approve-once"}}`, decide(ApproveOnce())},
		{"interactive", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"approve-once","approvedInteractively":true}}`, decide(ApproveOnce().Interactive())},
		{"Case081 session", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"approve-for-session"}}`, decide(ApproveForSession(PermissionApproval{}))},
		{"session commands", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"approve-for-session","approval":{"kind":"commands","commandIdentifiers":["ls"]}}}`,
			decide(ApproveForSession(PermissionApproval{Kind: "commands", CommandIdentifiers: []string{"ls"}}))},
		{"session server", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"approve-for-session","approval":{"kind":"mcp","serverName":"m","toolName":null}}}`,
			decide(ApproveForSession(PermissionApproval{Kind: "mcp", ServerName: "m"}))},
		{"session domain", EventPermissionRequested, url, hdlPermission, `{"result":{"kind":"approve-for-session","domain":"example.com"}}`, decide(ApproveDomainForSession("example.com"))},
		{"location", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"approve-for-location","approval":{"kind":"write"},"locationKey":"k"}}`,
			decide(ApproveForLocation(PermissionApproval{Kind: "write"}, "k"))},
		{"permanently", EventPermissionRequested, url, hdlPermission, `{"result":{"kind":"approve-permanently","domain":"example.com"}}`, decide(ApprovePermanently("example.com"))},
		{"reject", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"reject"}}`, decide(Reject(""))},
		{"Case081 feedback", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"reject","feedback":"not today"}}`, decide(Reject("not today"))},
		{"not available", EventPermissionRequested, shell, hdlPermission, unavailable, decide(UserNotAvailable())},
		{"context", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"reject","feedback":"f"},"decisionContext":{"outcome":"prompted_user","source":"human_response","surface":"sdk","responseCapability":"interactive"}}`,
			decide(Reject("f").WithContext(DecisionContext{"prompted_user", "human_response", "sdk", "interactive"}))},
		{"Case075 zero", EventPermissionRequested, shell, hdlPermission, unavailable, decide(PermissionDecision{})},
		{"zero interactive", EventPermissionRequested, shell, hdlPermission, unavailable, decide(PermissionDecision{}.Interactive())},
		{"approval beside an error", EventPermissionRequested, shell, hdlPermission, unavailable, hdlDecide(func() (PermissionDecision, error) { return ApproveOnce(), io.EOF })},
		{"location without key", EventPermissionRequested, shell, hdlPermission, unavailable, decide(ApproveForLocation(PermissionApproval{Kind: "write"}, ""))},
		{"location without approval", EventPermissionRequested, shell, hdlPermission, unavailable, decide(ApproveForLocation(PermissionApproval{}, "k"))},
		{"Case081 unknown approval", EventPermissionRequested, shell, hdlPermission, unavailable, decide(ApproveForSession(PermissionApproval{Kind: "all"}))},
		{"approval of nothing", EventPermissionRequested, shell, hdlPermission, unavailable, decide(ApproveForSession(PermissionApproval{Kind: "commands"}))},
		{"permanently, no url", EventPermissionRequested, shell, hdlPermission, unavailable, decide(ApprovePermanently("example.com"))},
		{"ApproveAll", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"approve-once"}}`, SessionConfig{OnPermission: ApproveAll}},
		{"ApproveAll managed", EventPermissionRequested, shell, hdlPermission, unavailable, SessionConfig{OnPermission: ApproveAll, ManagedSettings: &ManagedSettings{}}},
		{"ApproveAll enabled managed", EventPermissionRequested, shell, hdlPermission, unavailable, SessionConfig{OnPermission: ApproveAll, EnableManagedSettings: or[bool](nil, true)}},
		{"DenyAll", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"reject","feedback":"denied by the host's policy"}}`, SessionConfig{OnPermission: DenyAll}},
		{"ApproveIf true", EventPermissionRequested, shell, hdlPermission, `{"result":{"kind":"approve-once"}}`,
			SessionConfig{OnPermission: ApproveIf(func(r PermissionRequest) bool { return r.Kind == PermissionShell })}},
		{"ApproveIf false", EventPermissionRequested, url, hdlPermission, `{"result":{"kind":"reject","feedback":"denied by the host's policy"}}`,
			SessionConfig{OnPermission: ApproveIf(func(r PermissionRequest) bool { return r.Kind == PermissionShell })}},
		{"ApproveIf false, human wanted", EventPermissionRequested, `"permissionRequest":{"kind":"url","managedApprovalRequired":true}`, hdlPermission,
			`{"result":{"kind":"reject","feedback":"denied by the host's policy"}}`, SessionConfig{OnPermission: ApproveIf(func(r PermissionRequest) bool { return false })}},

		{"accept", EventElicitationRequested, `"message":"m"`, hdlElicit, `{"result":{"action":"accept","content":{"n":1.10,"s":"x"}}}`,
			elicit(func() (ElicitationResult, error) {
				return ElicitationResult{ElicitationAccept, map[string]any{"n": json.Number("1.10"), "s": "x"}}, nil
			})},
		{"Case080 accept nothing", EventElicitationRequested, `"message":"m"`, hdlElicit, `{"result":{"action":"accept","content":{}}}`,
			elicit(func() (ElicitationResult, error) { return ElicitationResult{Action: ElicitationAccept}, nil })},
		{"accept page", EventElicitationRequested, `"message":"m","mode":"url","url":"http://127.0.0.1/"`, hdlElicit, `{"result":{"action":"accept"}}`,
			elicit(func() (ElicitationResult, error) {
				return ElicitationResult{ElicitationAccept, map[string]any{"x": 1}}, nil
			})},
		{"Case080 decline", EventElicitationRequested, `"message":"m"`, hdlElicit, `{"result":{"action":"decline"}}`,
			elicit(func() (ElicitationResult, error) {
				return ElicitationResult{ElicitationDecline, map[string]any{"x": 1}}, nil
			})},
		{"Case080 cancel", EventElicitationRequested, `"message":"m"`, hdlElicit, `{"result":{"action":"cancel"}}`,
			elicit(func() (ElicitationResult, error) {
				return ElicitationResult{ElicitationCancel, map[string]any{"x": 1}}, nil
			})},
		{"zero", EventElicitationRequested, `"message":"m"`, hdlElicit, `{"result":{"action":"cancel"}}`, elicit(func() (r ElicitationResult, err error) { return })},
		{"unknown", EventElicitationRequested, `"message":"m"`, hdlElicit, `{"result":{"action":"cancel"}}`,
			elicit(func() (ElicitationResult, error) { return ElicitationResult{Action: "Accept"}, nil })},
		{"no encoding", EventElicitationRequested, `"message":"m"`, hdlElicit, `{"result":{"action":"cancel"}}`,
			elicit(func() (ElicitationResult, error) {
				return ElicitationResult{ElicitationAccept, map[string]any{"x": io.EOF.Error}}, nil
			})},

		{"done", EventCommandExecute, `"commandName":"deploy"`, hdlCommand, `{}`, command(func() error { return nil })},

		{"token", EventMCPOAuthRequired, `"serverName":"m"`, hdlOAuth, `{"result":{"kind":"token","accessToken":"tok","tokenType":"Bearer","expiresIn":90}}`,
			auth(func() (*MCPAuthToken, error) {
				return &MCPAuthToken{"tok", "Bearer", 90*time.Second + time.Millisecond}, nil
			})},
		{"token only", EventMCPOAuthRequired, `"serverName":"m"`, hdlOAuth, `{"result":{"kind":"token","accessToken":"tok"}}`,
			auth(func() (*MCPAuthToken, error) { return &MCPAuthToken{AccessToken: "tok"}, nil })},
		{"declined", EventMCPOAuthRequired, `"serverName":"m"`, hdlOAuth, `{"result":{"kind":"cancelled"}}`, auth(func() (*MCPAuthToken, error) { return nil, nil })},
		{"no text", EventMCPOAuthRequired, `"serverName":"m"`, hdlOAuth, `{"result":{"kind":"cancelled"}}`, auth(func() (*MCPAuthToken, error) { return &MCPAuthToken{}, nil })},
		{"token beside an error", EventMCPOAuthRequired, `"serverName":"m"`, hdlOAuth, `{"result":{"kind":"cancelled"}}`,
			auth(func() (*MCPAuthToken, error) { return &MCPAuthToken{AccessToken: "tok"}, io.EOF })},

		{"message", EventSamplingRequested, `"serverName":"m","mcpRequestId":1`, hdlSampling, `{"response":{"role":"assistant"}}`,
			sampling(func() (any, error) { return map[string]string{"role": "assistant"}, nil })},
		{"declined", EventSamplingRequested, `"serverName":"m"`, hdlSampling, `{}`, sampling(func() (any, error) { return nil, nil })},
		{"no encoding", EventSamplingRequested, `"serverName":"m"`, hdlSampling, `{}`, sampling(func() (any, error) { return make(chan int), nil })},
	}
	for name, stop := range hdlStops() {
		why := map[bool]string{true: "boom", false: "the host's handler panicked"}[name == "error"]
		cases = append(cases,
			tc{"Case071 " + name, EventExternalToolRequested, called, hdlTool, failed(why), hdlToolConfig(func(context.Context, ToolCall) (ToolResult, error) { return ToolResult{Text: "x"}, stop() })},
			tc{"Case077 " + name, EventPermissionRequested, shell, hdlPermission, unavailable, hdlDecide(func() (PermissionDecision, error) { return ApproveOnce(), stop() })},
			tc{name, EventPermissionRequested, shell, hdlPermission, unavailable, SessionConfig{OnPermission: ApproveIf(func(PermissionRequest) bool { _ = stop(); panic("error") })}},
			tc{name, EventElicitationRequested, `"message":"m"`, hdlElicit, `{"result":{"action":"cancel"}}`, elicit(func() (ElicitationResult, error) { return ElicitationResult{Action: ElicitationAccept}, stop() })},
			tc{name, EventCommandExecute, `"commandName":"deploy"`, hdlCommand, fmt.Sprintf(`{"error":%q}`, why), command(stop)},
			tc{name, EventMCPOAuthRequired, `"serverName":"m"`, hdlOAuth, `{"result":{"kind":"cancelled"}}`, auth(func() (*MCPAuthToken, error) { return nil, stop() })},
			tc{name, EventSamplingRequested, `"serverName":"m"`, hdlSampling, `{}`, sampling(func() (any, error) { return 1, stop() })},
		)
	}
	var log hdlLog
	c, p := newPeer(t, &Options{Logger: log.logger()})
	answers := make(map[string]int)
	for i, tc := range cases {
		t.Run(string(tc.event)+"/"+tc.name, func(t *testing.T) {
			tc.cfg.SessionID = fmt.Sprint("s", i)
			s := createSession(t, c, &tc.cfg)
			p.emit(s.ID(), string(tc.event), json.RawMessage(`{"requestId":"r",`+tc.data+`}`))
			answers[tc.method]++
			got := hdlJSON(t, p.wait(tc.method, answers[tc.method]).Params)
			want := splice(splice(json.RawMessage(tc.want), "requestId", "r"), "sessionId", s.ID())
			if want := hdlJSON(t, want); got != want {
				t.Errorf("answered %s\nwant %s", got, want)
			}
			if strings.Contains(got, ".go") || strings.Contains(got, "goroutine") {
				t.Errorf("a stack reached the server: %s", got)
			}
		})
	}
	if !strings.Contains(log.String(), "bang") || !strings.Contains(log.String(), "copilot_test.go") {
		t.Error("no panic with its stack in the log")
	}
	if !strings.Contains(log.String(), "managed settings do not let") {
		t.Error("the log does not say why ApproveAll approved nothing")
	}
}

// TestBroadcastInputs checks what handlers of broadcasts are told.
func TestBroadcastInputs(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	got := make(chan any, 1)
	createSession(t, c, &SessionConfig{SessionID: "s",
		Tools: []Tool{{Name: "t", Handler: func(ctx context.Context, call ToolCall) (ToolResult, error) {
			parent, state := TraceContextFrom(ctx)
			got <- fmt.Sprintf("%s %s %s %s %s %s %s %s %s", call.SessionID, call.RequestID, call.ID, call.Name, call.Arguments, call.WorkingDirectory, call.AgentID, parent, state)
			return ToolResult{}, nil
		}}},
		OnPermission: func(_ context.Context, r PermissionRequest) (PermissionDecision, error) {
			got <- r
			return NoResult(), nil
		},
		OnElicitation: func(_ context.Context, r ElicitationRequest) (ElicitationResult, error) {
			got <- fmt.Sprintf("%s %s %s %s %s %s %s %s %s", r.SessionID, r.RequestID, r.ToolCallID, r.Source, r.Message, r.Mode, r.Schema, r.URL, r.ElicitationID)
			return ElicitationResult{}, nil
		},
		Commands: []Command{{Name: "deploy", Handler: func(_ context.Context, c CommandCall) error {
			got <- fmt.Sprintf("%s %s|%s|%s", c.SessionID, c.Name, c.Args, c.Text)
			return nil
		}}},
		OnMCPAuth: func(_ context.Context, r MCPAuthRequest) (*MCPAuthToken, error) {
			got <- fmt.Sprintf("%s %s %s %s %s %s %s %s %d %s %s", r.SessionID, r.RequestID, r.ServerName, r.ServerURL, r.Reason, r.Client.ClientID, r.Client.ClientSecret,
				r.Challenge.Scope, r.Response.StatusCode, r.Response.Headers[0].Value, r.ResourceMetadata)
			return nil, nil
		},
		OnSampling: func(_ context.Context, r SamplingRequest) (any, error) {
			got <- fmt.Sprintf("%s %s %s %s", r.SessionID, r.ServerName, r.MCPRequestID, r.Request)
			return nil, nil
		},
	})
	n := 0
	tell := func(typ EventType, data string, extra ...any) any {
		t.Helper()
		n++
		p.emit("s", string(typ), splice(json.RawMessage(data), "requestId", fmt.Sprint("r", n)), extra...)
		return await(t, string(typ), got)
	}
	for _, tc := range []struct {
		typ        EventType
		data, want string
	}{
		{EventExternalToolRequested, `{"toolName":"t","toolCallId":"c","arguments":{"n":12345678901234567890,"e":"\u00fc"},"workingDirectory":"/w"}`,
			`s r1 c t {"n":12345678901234567890,"e":"\u00fc"} /w sub  `},
		{EventExternalToolRequested, `{"toolName":"t","toolCallId":"c","traceparent":"00-a-b-01","tracestate":"k=v"}`, `s r2 c t {}  sub 00-a-b-01 k=v`},
		{EventExternalToolRequested, `{"toolName":"t","toolCallId":"c","arguments":null}`, `s r3 c t {}  sub  `},
		{EventExternalToolRequested, `{"toolName":"t","toolCallId":"c","arguments":"text"}`, `s r4 c t "text"  sub  `},
		{EventElicitationRequested, `{"message":"m","toolCallId":"c","elicitationSource":"srv","requestedSchema":{"type":"object"}}`, `s r5 c srv m form {"type":"object"}  `},
		{EventElicitationRequested, `{"message":"m","mode":"url","url":"u","elicitationId":"e"}`, `s r6   m url  u e`},
		{EventCommandExecute, `{"commandName":"deploy","args":"prod now","command":"/deploy prod now"}`, `s deploy|prod now|/deploy prod now`},
		{EventMCPOAuthRequired, `{"serverName":"m","serverUrl":"u","reason":"initial","staticClientConfig":{"clientId":"i","clientSecret":"hush"},
			"wwwAuthenticateParams":{"scope":"sc"},"httpResponse":{"statusCode":401,"headers":[{"name":"X","value":"v"}]},"resourceMetadata":"{}"}`, `s r8 m u initial i hush sc 401 v {}`},
		{EventSamplingRequested, `{"serverName":"m","mcpRequestId":7,"request":{"messages":[]}}`, `s m 7 {"messages":[]}`},
	} {
		if got := tell(tc.typ, tc.data, "agentId", "sub"); got != tc.want {
			t.Errorf("%s: handler got %q, want %q", tc.typ, got, tc.want)
		}
	}

	ask := func(data string) PermissionRequest {
		return tell(EventPermissionRequested, data, "agentId", "sub").(PermissionRequest)
	}
	r := ask(`{"permissionRequest":{"kind":"shell","toolCallId":"c","fullCommandText":"ls > x","intention":"look","commands":[{"identifier":"ls","readOnly":true}],
		"possiblePaths":["x"],"possibleUrls":[{"url":"u"}],"hasWriteFileRedirection":true,"canOfferSessionApproval":true,"requestSandboxBypassReason":null},"promptRequest":{"kind":"commands"}}`)
	if r.SessionID != "s" || r.AgentID != "sub" || r.Kind != PermissionShell || r.ToolCallID != "c" || r.Intention != "look" || r.FullCommandText != "ls > x" ||
		!r.Commands[0].ReadOnly || r.PossibleURLs[0] != "u" || !r.HasWriteFileRedirection || !r.CanOfferSessionApproval || len(r.Paths()) != 1 ||
		string(r.Prompt) != `{"kind":"commands"}` || r.Managed || r.ManagedApprovalRequired || r.RequestID == "" || !bytes.Contains(r.Raw, []byte("fullCommandText")) {
		t.Errorf("got %+v", r)
	}
	if r := ask(`{"kind":"read","path":"/etc","intention":"look"}`); r.Kind != PermissionRead || r.Paths()[0] != "/etc" {
		t.Errorf("request without its object: got %+v", r)
	}
	if r := ask(`{"permissionRequest":{"kind":"read","path":["/etc"]}}`); r.Kind != "" || r.Path != "" || !bytes.Contains(r.Raw, []byte(`["/etc"]`)) {
		t.Errorf("request that does not fit: got %+v", r)
	}
	if r := ask(`{"permissionRequest":{"kind":"future","x":1}}`); r.Kind != "future" || !bytes.Contains(r.Raw, []byte(`"x":1`)) {
		t.Errorf("unknown kind: got %+v", r)
	}
	for _, required := range []string{`true`, `"false"`, `0`, `{}`} {
		if r := ask(`{"permissionRequest":{"kind":"read","managedApprovalRequired":` + required + `}}`); !r.ManagedApprovalRequired {
			t.Errorf("managedApprovalRequired %s passes for a no", required)
		}
		if r := ask(`{"permissionRequest":{"kind":"read"},"promptRequest":{"managedApprovalRequired":` + required + `}}`); !r.ManagedApprovalRequired {
			t.Errorf("prompt's managedApprovalRequired %s passes for a no", required)
		}
	}
	if r := ask(`{"permissionRequest":{"kind":"read","managedApprovalRequired":null},"promptRequest":{"managedApprovalRequired":false}}`); r.ManagedApprovalRequired {
		t.Error("managedApprovalRequired null and false count as yes")
	}
}

// hdlQuiet returns when no handler of the session is at work any more and all that was written has been read.
func hdlQuiet(t testing.TB, p *peer, s *Session) {
	t.Helper()
	p.sync()
	for {
		s.tasks.mu.Lock()
		var one *task
		for _, one = range s.tasks.byKey {
			break
		}
		s.tasks.mu.Unlock()
		if one == nil {
			break
		}
		await(t, "end of a handler", one.ctx.Done()) // at the latest when it is over
		runtime.Gosched()
	}
	if _, err := s.client.call(testContext(t), "ping", nil, nil); err != nil {
		t.Fatal(err)
	}
}

// TestBroadcastsLeftAlone: what is not ours, or is not to be answered, gets no answer. Covers cases 072 and 076, and the stray broadcast of 077.
func TestBroadcastsLeftAlone(t *testing.T) {
	leakCheck(t)
	called := func(what string) func(context.Context, ToolCall) (ToolResult, error) {
		return func(context.Context, ToolCall) (ToolResult, error) {
			t.Error(what + " was called")
			return ToolResult{}, nil
		}
	}
	tools := hdlToolConfig(called("t"))
	asked := hdlDecide(func() (PermissionDecision, error) { t.Error("asked"); return ApproveOnce(), nil })
	form := SessionConfig{OnElicitation: func(context.Context, ElicitationRequest) (ElicitationResult, error) {
		t.Error("form shown")
		return ElicitationResult{}, nil
	}}
	c, p := newPeer(t, nil)
	createSession(t, c, &SessionConfig{SessionID: "other", Tools: []Tool{{Name: "elsewhere", Handler: called("elsewhere")}}})
	for i, tc := range []struct {
		name string
		typ  EventType
		data string
		cfg  SessionConfig
	}{
		{"no handlers", EventPermissionRequested, `{"requestId":"r","permissionRequest":{"kind":"shell"}}`, SessionConfig{}},
		{"no handlers", EventElicitationRequested, `{"requestId":"r","message":"m"}`, SessionConfig{}},
		{"no handlers", EventMCPOAuthRequired, `{"requestId":"r","serverName":"m"}`, SessionConfig{}},
		{"no handlers", EventSamplingRequested, `{"requestId":"r","serverName":"m"}`, SessionConfig{}},
		{"no handlers", EventCommandQueued, `{"requestId":"r","command":"/x"}`, SessionConfig{}},
		{"Case072 unknown tool", EventExternalToolRequested, `{"requestId":"r","toolName":"u","toolCallId":"c"}`, tools},
		{"Case072 tool without name", EventExternalToolRequested, `{"requestId":"r","toolName":"","toolCallId":"c"}`, tools},
		{"Case072 tool of another session", EventExternalToolRequested, `{"requestId":"r","toolName":"elsewhere","toolCallId":"c"}`, tools},
		{"declared tool", EventExternalToolRequested, `{"requestId":"r","toolName":"declared","toolCallId":"c"}`, tools},
		{"odd tool name", EventExternalToolRequested, `{"requestId":"r","toolName":["t"],"toolCallId":"c"}`, tools},
		{"no request id", EventExternalToolRequested, `{"toolName":"t","toolCallId":"c"}`, tools},
		{"odd request id", EventExternalToolRequested, `{"requestId":1,"toolName":"t","toolCallId":"c"}`, tools},
		{"no data", EventExternalToolRequested, `null`, tools},
		{"unknown command", EventCommandExecute, `{"requestId":"r","commandName":"deploy"}`, tools},
		{"hook decided", EventPermissionRequested, `{"requestId":"r","resolvedByHook":true,"permissionRequest":{"kind":"shell"}}`, asked},
		{"empty request id", EventPermissionRequested, `{"requestId":"","permissionRequest":{"kind":"shell"}}`, asked},
		{"odd form", EventElicitationRequested, `{"requestId":"r","message":["m"]}`, form},
		{"no result", EventPermissionRequested, `{"requestId":"r","permissionRequest":{"kind":"shell"}}`, hdlDecide(func() (PermissionDecision, error) { return NoResult(), nil })},
		{"human wanted", EventPermissionRequested, `{"requestId":"r","permissionRequest":{"kind":"shell","managedApprovalRequired":true}}`, SessionConfig{OnPermission: ApproveAll}},
		{"human wanted", EventPermissionRequested, `{"requestId":"r","permissionRequest":{"kind":"shell","managedApprovalRequired":"x"}}`,
			SessionConfig{OnPermission: ApproveIf(func(PermissionRequest) bool { return true })}},
	} {
		t.Run(string(tc.typ)+"/"+tc.name, func(t *testing.T) {
			tc.cfg.SessionID = fmt.Sprint("s", i)
			s := createSession(t, c, &tc.cfg)
			p.emit(s.ID(), string(tc.typ), json.RawMessage(tc.data))
			hdlQuiet(t, p, s)
			for _, m := range p.calls("") {
				if m.get("sessionId") == s.ID() && m.Method != "session.create" && !strings.HasPrefix(m.Method, "session.eventLog") {
					t.Errorf("the client called %s %s", m.Method, m.Params)
				}
			}
			if flag := p.calls("session.create")[i+1].get("requestPermission"); flag != (tc.cfg.OnPermission != nil) {
				t.Errorf("requestPermission is %v", flag)
			}
		})
	}
}

// TestDuplicateBroadcasts: one request, one call of the handler, one answer.
func TestDuplicateBroadcasts(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	calls := make(chan string, 8)
	s := createSession(t, c, &SessionConfig{SessionID: "s", Tools: []Tool{{Name: "t", Handler: func(_ context.Context, c ToolCall) (ToolResult, error) {
		calls <- c.RequestID
		return ToolResult{}, nil
	}}}})
	ask := func(id string) any {
		return p.event("s", "external_tool.requested", map[string]any{"requestId": id, "toolName": "t", "toolCallId": "c"})
	}
	p.send(ask("r1"), ask("r1"))
	p.wait(hdlTool, 1)
	hdlQuiet(t, p, s)
	p.send(ask("r1"), ask("r2")) // long after
	p.wait(hdlTool, 2)
	hdlQuiet(t, p, s)
	if n := len(p.calls(hdlTool)); n != 2 || len(calls) != 2 {
		t.Errorf("%d answers by %d calls to 2 requests", n, len(calls))
	}
}

// hdlBlock is a handler that waits for its context, or for release, and tells when it has begun and why it ended.
type hdlBlock struct {
	begun   chan context.Context
	causes  chan error
	release chan struct{}
}

func newHdlBlock() *hdlBlock {
	return &hdlBlock{make(chan context.Context, 8), make(chan error, 8), make(chan struct{})}
}

func (b *hdlBlock) wait(ctx context.Context) error {
	b.begun <- ctx
	select {
	case <-ctx.Done():
		b.causes <- context.Cause(ctx)
		return ctx.Err()
	case <-b.release:
		return nil
	}
}

func (b *hdlBlock) tool(ctx context.Context, _ ToolCall) (ToolResult, error) {
	return ToolResult{Text: "done"}, b.wait(ctx)
}

func (b *hdlBlock) permission(ctx context.Context, _ PermissionRequest) (PermissionDecision, error) {
	return ApproveOnce(), b.wait(ctx)
}

func (p *peer) askTool(session, id string) {
	p.emit(session, "external_tool.requested", map[string]any{"requestId": id, "toolName": "t", "toolCallId": "c-" + id})
}

func (p *peer) askPermission(session, id string) {
	p.emit(session, "permission.requested", map[string]any{"requestId": id, "permissionRequest": map[string]any{"kind": "shell"}})
}

// TestCase078PendingPermission: whatever takes the request's reason away ends the wait, and tells what it was.
func TestCase078PendingPermission(t *testing.T) {
	leakCheck(t)
	const unavailable = `"result":{"kind":"user-not-available"}`
	causes := make(map[string]error)
	for _, tc := range []struct {
		name   string
		end    func(c *Client, p *peer, s *Session) error
		want   error
		answer bool
	}{
		{"abort event", func(c *Client, p *peer, s *Session) error {
			p.emit("s", "abort", map[string]any{"reason": "user_initiated"})
			return nil
		}, ErrAborted, true},
		{"Abort", func(c *Client, p *peer, s *Session) error { return s.Abort(testContext(t)) }, ErrAborted, true},
		{"Disconnect", func(c *Client, p *peer, s *Session) error { return s.Disconnect(testContext(t)) }, errLeaving, true},
		{"Stop", func(c *Client, p *peer, s *Session) error { return c.Stop(testContext(t)) }, errStopping, true},
		{"completed", func(c *Client, p *peer, s *Session) error {
			p.emit("s", "permission.completed", map[string]any{"requestId": "r", "result": map[string]any{"kind": "approved"}})
			return nil
		}, errResolved, false},
		{"deleted", func(c *Client, p *peer, s *Session) error {
			p.send(notification("session.lifecycle", map[string]any{"type": "session.deleted", "sessionId": "s"}))
			return nil
		}, ErrSessionNotFound, false},
		{"ForceStop", func(c *Client, p *peer, s *Session) error { c.ForceStop(); return nil }, ErrClosed, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, p := newPeer(t, nil)
			b := newHdlBlock()
			released := make(chan struct{})
			p.handle("session.destroy", func(p *peer, m peerMessage) any { // answered when the host's answer has come
				go func() {
					<-released
					p.answer(m.ID, map[string]any{"success": true})
				}()
				return noAnswer
			})
			s := createSession(t, c, &SessionConfig{SessionID: "s", OnPermission: b.permission})
			p.askPermission("s", "r")
			ctx := await(t, "handler", b.begun)
			ended := async(func() error { return tc.end(c, p, s) })
			cause := await(t, "handler's context", b.causes)
			if !errors.Is(cause, tc.want) {
				t.Errorf("cause is %v, want %v", cause, tc.want)
			}
			causes[tc.name] = cause
			if tc.answer {
				if got := p.wait(hdlPermission, 1); !bytes.Contains(got.Params, []byte(unavailable)) {
					t.Errorf("answered %s", got.Params)
				}
			}
			close(released)
			if err := await(t, tc.name, ended); err != nil {
				t.Error(err)
			}
			await(t, "end of the handler", ctx.Done())
			if !tc.answer && c.conn.failure() == nil {
				hdlQuiet(t, p, s)
				if n := len(p.calls(hdlPermission)); n != 0 {
					t.Errorf("%d answers to what was resolved already", n)
				}
			}
		})
	}
	for _, pair := range [][2]string{{"Abort", "Disconnect"}, {"Disconnect", "Stop"}, {"Stop", "completed"}, {"completed", "Abort"}} {
		if causes[pair[0]] == causes[pair[1]] {
			t.Errorf("%s and %s have the same cause: %v", pair[0], pair[1], causes[pair[0]])
		}
	}
}

// TestCase065AbortWithTool: abort ends the tool's context, what the tool says still goes out, and the waiter is told.
func TestCase065AbortWithTool(t *testing.T) {
	leakCheck(t)
	for _, byEvent := range []bool{true, false} {
		c, p := newPeer(t, nil)
		b := newHdlBlock()
		s := createSession(t, c, &SessionConfig{SessionID: "s", Tools: []Tool{{Name: "t", Handler: b.tool}},
			Commands: []Command{{Name: "deploy", Handler: func(ctx context.Context, _ CommandCall) error { return b.wait(ctx) }}}})
		ctx, cancel := context.WithCancel(testContext(t))
		turn := async(func() error { _, err := s.SendAndWait(ctx, Message{Prompt: "x"}); return err })
		p.wait("session.send", 1)
		p.emit("s", "command.execute", map[string]any{"requestId": "cmd", "commandName": "deploy"}) // no part of the turn
		command := await(t, "command", b.begun)
		p.askTool("s", "r")
		await(t, "tool", b.begun)
		p.handle("session.abort", func(p *peer, m peerMessage) any {
			if byEvent {
				p.emit("s", "abort", map[string]any{"reason": "user_initiated"})
			}
			return map[string]any{"success": true}
		})
		if err := s.Abort(testContext(t)); err != nil {
			t.Fatal(err)
		}
		if cause := await(t, "tool's context", b.causes); !errors.Is(cause, ErrAborted) {
			t.Errorf("cause is %v", cause)
		}
		if got := p.wait(hdlTool, 1); got.get("requestId") != "r" {
			t.Errorf("answered %s", got.Params)
		}
		if command.Err() != nil {
			t.Errorf("the abort of the turn ended a command: %v", context.Cause(command))
		}
		if !byEvent { // neither event nor idle comes: the deadline is the caller's
			cancel()
		}
		err := await(t, "waiter", turn)
		if want := map[bool]error{true: ErrAborted, false: context.Canceled}[byEvent]; !errors.Is(err, want) {
			t.Errorf("SendAndWait: %v, want %v", err, want)
		}
		cancel()
		if err := s.Disconnect(testContext(t)); err != nil {
			t.Error(err)
		}
		if n := len(p.calls("session.abort")); n != 1 {
			t.Errorf("%d aborts, Disconnect must send none", n)
		}
	}
}

// TestAbortOfSubagent ends the calls of that agent only.
func TestAbortOfSubagent(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	b := newHdlBlock()
	s := createSession(t, c, &SessionConfig{SessionID: "s", Tools: []Tool{{Name: "t", Handler: b.tool}}})
	data := map[string]any{"requestId": "r1", "toolName": "t", "toolCallId": "c"}
	p.emit("s", "external_tool.requested", data)
	main := await(t, "main agent's tool", b.begun)
	data["requestId"] = "r2"
	p.emit("s", "external_tool.requested", data, "agentId", "a")
	sub := await(t, "sub-agent's tool", b.begun)
	p.emit("s", "abort", nil, "agentId", "a")
	await(t, "sub-agent's tool", sub.Done())
	p.sync()
	if main.Err() != nil {
		t.Error("the main agent's tool ended with it")
	}
	p.emit("s", "abort", nil)
	await(t, "main agent's tool", main.Done())
	_ = s
}

// TestCase047ConnectionLost: handlers learn of the connection's end, and nobody waits for one that does not heed it.
func TestCase047ConnectionLost(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	b := newHdlBlock()
	deaf, asked := make(chan struct{}), make(chan struct{})
	returned := make(chan struct{})
	createSession(t, c, &SessionConfig{SessionID: "s", Tools: []Tool{{Name: "t", Handler: b.tool}},
		OnUserInput: func(context.Context, UserInputRequest) (UserInputResponse, error) {
			defer close(returned)
			close(asked)
			<-deaf
			return UserInputResponse{}, nil
		}})
	p.askTool("s", "r")
	await(t, "tool", b.begun)
	p.ask("userInput.request", map[string]any{"sessionId": "s", "question": "q"})
	await(t, "question", asked)
	p.conn.Close()
	if cause := await(t, "tool's context", b.causes); !errors.Is(cause, io.ErrUnexpectedEOF) {
		t.Errorf("cause is %v", cause)
	}
	await(t, "client's end", c.Done())
	if err := c.Stop(testContext(t)); err != nil {
		t.Error(err)
	}
	close(deaf)
	await(t, "deaf handler", returned)
}

// TestCase028AnswerAfterIdle: the turn's end takes no answer away; one that comes when the client has stopped harms nobody.
func TestCase028AnswerAfterIdle(t *testing.T) {
	leakCheck(t)
	var log hdlLog
	c, p := newPeer(t, &Options{Logger: log.logger()})
	b := newHdlBlock()
	late, lateBegun := make(chan struct{}), make(chan context.Context, 1)
	s := createSession(t, c, &SessionConfig{SessionID: "s", Tools: []Tool{{Name: "t", Handler: b.tool}, {Name: "deaf", Handler: func(ctx context.Context, _ ToolCall) (ToolResult, error) {
		lateBegun <- ctx
		<-late
		return ToolResult{}, nil
	}}}})
	p.askTool("s", "r1")
	await(t, "tool", b.begun)
	p.emit("s", "session.idle", map[string]any{})
	p.sync()
	close(b.release)
	if got := p.wait(hdlTool, 1); got.get("result") != "done" {
		t.Errorf("answered %s", got.Params)
	}
	p.emit("s", "external_tool.requested", map[string]any{"requestId": "r2", "toolName": "deaf", "toolCallId": "c"})
	ctx := await(t, "deaf tool", lateBegun)
	if err := c.Stop(testContext(t)); err != nil {
		t.Error(err)
	}
	s.tasks.mu.Lock()
	last := s.tasks.byKey["external_tool r2"]
	s.tasks.mu.Unlock()
	close(late)
	await(t, "deaf tool's context", ctx.Done())
	for c.agentWork.busy() { // its answer has nowhere to go
		runtime.Gosched()
	}
	if !last.settled.Load() || strings.Contains(log.String(), "panic") {
		t.Errorf("the late answer was not dropped quietly:\n%s", log.String())
	}
}

func (l *limiter) busy() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.running > 0
}

// TestCase049HandlersCallBack: everything may be called from everywhere.
func TestCase049HandlersCallBack(t *testing.T) {
	leakCheck(t)
	places := map[string]func(p *peer, call func() error, cfg *SessionConfig) (trigger func()){
		"tool": func(p *peer, call func() error, cfg *SessionConfig) func() {
			cfg.Tools = []Tool{{Name: "t", Handler: func(context.Context, ToolCall) (ToolResult, error) { return ToolResult{}, call() }}}
			return func() { p.askTool("s", "r") }
		},
		"permission": func(p *peer, call func() error, cfg *SessionConfig) func() {
			cfg.OnPermission = func(context.Context, PermissionRequest) (PermissionDecision, error) { return ApproveOnce(), call() }
			return func() { p.askPermission("s", "r") }
		},
		"hook": func(p *peer, call func() error, cfg *SessionConfig) func() {
			cfg.OnHook = func(context.Context, HookCall) (any, error) { return nil, call() }
			return func() { p.ask("hooks.invoke", map[string]any{"sessionId": "s", "hookType": "agentStop"}) }
		},
		"question": func(p *peer, call func() error, cfg *SessionConfig) func() {
			cfg.OnUserInput = func(context.Context, UserInputRequest) (UserInputResponse, error) { return UserInputResponse{}, call() }
			return func() { p.ask("userInput.request", map[string]any{"sessionId": "s", "question": "q"}) }
		},
		"notification": func(p *peer, call func() error, cfg *SessionConfig) func() {
			cfg.Handlers = map[string]HandlerFunc{"x.notice": func(context.Context, string, json.RawMessage) (any, error) { return nil, call() }}
			return func() { p.send(notification("x.notice", map[string]any{"sessionId": "s"})) }
		},
		"event loop": func(p *peer, call func() error, cfg *SessionConfig) func() { return nil },
	}
	for name, place := range places {
		for _, last := range []string{"Disconnect", "Stop", "ForceStop"} {
			t.Run(name+"/"+last, func(t *testing.T) {
				c, p := newPeer(t, nil)
				started := make(chan *Session, 1)
				done := make(chan error, 1)
				call := func() error {
					s := <-started
					ctx := testContext(t)
					_, err := s.Send(ctx, Message{Prompt: "x"})
					_, errHistory := s.History(ctx)
					other, errOther := c.CreateSession(ctx, nil)
					if errOther == nil {
						errOther = other.Disconnect(ctx)
					}
					sub := s.Subscribe()
					sub.Close()
					err = errors.Join(err, errHistory, errOther, s.Abort(ctx))
					switch last {
					case "Disconnect":
						err = errors.Join(err, s.Disconnect(ctx))
					case "Stop":
						err = errors.Join(err, c.Stop(ctx))
					case "ForceStop":
						c.ForceStop()
					}
					done <- err
					return nil
				}
				cfg := &SessionConfig{SessionID: "s"}
				trigger := place(p, call, cfg)
				s := createSession(t, c, cfg)
				started <- s
				if trigger != nil {
					trigger()
				} else {
					sub := s.Subscribe()
					p.emit("s", "session.idle", map[string]any{})
					for range sub.All(testContext(t)) {
						_ = call()
						break
					}
					sub.Close()
				}
				if err := await(t, "calls", done); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// TestCase050QuestionHoldsNothingUp: a question is open for as long as the user likes; events and other sessions go on.
func TestCase050QuestionHoldsNothingUp(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	b := newHdlBlock()
	ask := func(ctx context.Context, r UserInputRequest) (UserInputResponse, error) {
		return UserInputResponse{Answer: r.SessionID}, b.wait(ctx)
	}
	s := createSession(t, c, &SessionConfig{SessionID: "s1", OnUserInput: ask})
	createSession(t, c, &SessionConfig{SessionID: "s2", OnUserInput: ask})
	sub := s.Subscribe()
	defer sub.Close()
	one := p.ask("userInput.request", map[string]any{"sessionId": "s1", "question": "q"})
	ctx := await(t, "first question", b.begun)
	for i := range 50 {
		p.emit("s1", "session.info", map[string]any{"n": i})
	}
	for i := range 50 {
		if e := next(t, sub); string(member(e.Data, "n")) != fmt.Sprint(i) {
			t.Fatalf("event %d is %s", i, e.Data)
		}
	}
	two := p.ask("userInput.request", map[string]any{"sessionId": "s2", "question": "q"})
	await(t, "second question", b.begun)
	if _, limited := ctx.Deadline(); limited || ctx.Err() != nil {
		t.Error("the library limits how long a user may think")
	}
	close(b.release)
	for name, c := range map[string]<-chan peerMessage{"s1": one, "s2": two} {
		if got, want := hdlOutcome(t, await(t, "answer", c)), fmt.Sprintf(`{"answer":%q,"wasFreeform":true}`, name); got != want {
			t.Errorf("answered %s, want %s", got, want)
		}
	}
}

// TestCase077LongApproval: no clock of ours runs while a human decides.
func TestCase077LongApproval(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	b := newHdlBlock()
	createSession(t, c, &SessionConfig{SessionID: "s", OnPermission: b.permission})
	p.askPermission("s", "r")
	if _, limited := await(t, "handler", b.begun).Deadline(); limited {
		t.Error("the handler's context has a deadline")
	}
	p.sync()
	close(b.release)
	if got, want := p.wait(hdlPermission, 1).Params, `{"requestId":"r","result":{"kind":"approve-once"},"sessionId":"s"}`; !sameJSON(got, []byte(want)) {
		t.Errorf("answered %s, want %s", got, want)
	}
}

// TestCase076SecondAnswer: somebody else was first, which is no error.
func TestCase076SecondAnswer(t *testing.T) {
	leakCheck(t)
	var log hdlLog
	c, p := newPeer(t, &Options{Logger: log.logger()})
	p.handle(hdlPermission, func(*peer, peerMessage) any { return map[string]any{"success": false} })
	s := createSession(t, c, &SessionConfig{SessionID: "s", OnPermission: ApproveAll})
	p.askPermission("s", "r")
	p.wait(hdlPermission, 1)
	hdlQuiet(t, p, s)
	if n := len(p.calls(hdlPermission)); n != 1 {
		t.Errorf("answered %d times", n)
	}
	if text := log.await(t, "came too late"); strings.Contains(text, "WARN") || strings.Contains(text, "ERROR") {
		t.Errorf("log:\n%s", text)
	}
}

// TestRefusedAnswer: an answer that the server does not take is replaced once, so that nothing is pending for ever.
func TestRefusedAnswer(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	for _, method := range []string{hdlTool, hdlPermission, hdlElicit} {
		p.refuse(method, codeInvalidParams, "no")
	}
	s := createSession(t, c, &SessionConfig{SessionID: "s", OnPermission: ApproveAll,
		Tools: []Tool{{Name: "t", Handler: func(context.Context, ToolCall) (ToolResult, error) { return ToolResult{}, nil }}},
		OnElicitation: func(context.Context, ElicitationRequest) (ElicitationResult, error) {
			return ElicitationResult{Action: ElicitationAccept}, nil
		}})
	p.askTool("s", "r")
	p.askPermission("s", "r")
	p.emit("s", "elicitation.requested", map[string]any{"requestId": "r", "message": "m"})
	for method, want := range map[string]string{hdlTool: `"resultType":"failure"`, hdlPermission: `"user-not-available"`, hdlElicit: `"cancel"`} {
		if got := p.wait(method, 2); !bytes.Contains(got.Params, []byte(want)) {
			t.Errorf("second answer %s, want %s", got.Params, want)
		}
	}
	hdlQuiet(t, p, s)
	for _, method := range []string{hdlTool, hdlPermission, hdlElicit} {
		if n := len(p.calls(method)); n != 2 {
			t.Errorf("%s was called %d times", method, n)
		}
	}
}

func TestCancelRequest(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, &Options{Handlers: map[string]HandlerFunc{}})
	b := newHdlBlock()
	c.opts.Handlers["installations.confirm"] = func(ctx context.Context, _ string, _ json.RawMessage) (any, error) { return "confirmed", b.wait(ctx) }
	answer := p.ask("installations.confirm", map[string]any{})
	ctx := await(t, "handler", b.begun)
	p.send(notification("$/cancelRequest", map[string]any{"id": 99}), notification("$/cancelRequest", map[string]any{}), notification("$/cancelRequest", nil))
	p.sync()
	if ctx.Err() != nil {
		t.Fatal("another request's cancellation ended it")
	}
	p.send(notification("$/cancelRequest", map[string]any{"id": 1}))
	if got, want := hdlOutcome(t, await(t, "answer", answer)), "error -32800 cancelled"; got != want {
		t.Errorf("answered %s, want %s", got, want)
	}
	if cause := await(t, "handler's context", b.causes); !errors.Is(cause, errCancelled) {
		t.Errorf("cause is %v", cause)
	}
	// No second answer: one would belong to no request of the peer's, so look at the wire's order.
	await(t, "handler's end", ctx.Done())
	for c.agentWork.busy() {
		runtime.Gosched()
	}
	p.sync()
	p.mu.Lock()
	defer p.mu.Unlock()
	answers := 0
	for _, m := range p.seen {
		if m.Method == "" && string(m.ID) == "1" {
			answers++
		}
	}
	if answers != 1 {
		t.Errorf("%d answers", answers)
	}
}

// TestCustomHandlers serves what this package does not know, and what it does in the host's own way.
func TestCustomHandlers(t *testing.T) {
	leakCheck(t)
	notices := make(chan string, 1)
	reply := func(result any, err error) HandlerFunc {
		return func(context.Context, string, json.RawMessage) (any, error) { return result, err }
	}
	c, p := newPeer(t, &Options{Handlers: map[string]HandlerFunc{
		"x.client": reply("client", nil),
		"x.both":   reply("client", nil),
		"x.nil":    reply(nil, nil),
		"x.error":  reply(nil, errors.New("boom")),
		"x.code":   reply(nil, fmt.Errorf("wrapped: %w", &RPCError{Code: -7, Message: "seven", Data: json.RawMessage(`{"a":1}`)})),
		"x.data":   reply(nil, &RPCError{Code: -7, Message: "seven", Data: json.RawMessage(`{`)}),
		"x.chan":   reply(make(chan int), nil),
		"x.panic":  func(context.Context, string, json.RawMessage) (any, error) { panic("bang") },
		"x.exit":   func(context.Context, string, json.RawMessage) (any, error) { runtime.Goexit(); return nil, nil },
		"x.echo": func(_ context.Context, method string, params json.RawMessage) (any, error) {
			return []any{method, params}, nil
		},
		"x.notice": func(_ context.Context, method string, params json.RawMessage) (any, error) {
			notices <- method + " " + string(params)
			return nil, nil
		},
	}})
	createSession(t, c, &SessionConfig{SessionID: "s", Handlers: map[string]HandlerFunc{
		"x.both": reply("session", nil), "x.session": reply("session", nil), "hooks.invoke": reply("own", nil)}})
	for _, tc := range []struct{ method, params, want string }{
		{"x.client", `{}`, `"client"`},
		{"x.client", `{"sessionId":"s"}`, `"client"`},
		{"x.client", `{"sessionId":"nobody"}`, `"client"`},
		{"x.both", `{"sessionId":"s"}`, `"session"`},
		{"x.both", `{}`, `"client"`},
		{"x.session", `{"sessionId":"s"}`, `"session"`},
		{"x.session", `{}`, `error -32601 method not found: x.session`},
		{"hooks.invoke", `{"sessionId":"s"}`, `"own"`},
		{"x.nil", `{}`, `null`},
		{"x.error", `{}`, `error -32603 boom`},
		{"x.code", `{}`, `error -7 seven{"a":1}`},
		{"x.data", `{}`, `error -7 seven`},
		{"x.chan", `{}`, `error -32603 the result cannot be encoded`},
		{"x.panic", `{}`, `error -32603 the host's handler panicked`},
		{"x.exit", `{}`, `error -32603 the host's handler panicked`},
		{"x.echo", `{"n":12345678901234567890}`, `["x.echo",{"n":12345678901234567890}]`},
		{"x.unknown", `{}`, `error -32601 method not found: x.unknown`},
	} {
		if got := hdlOutcome(t, p.request(tc.method, json.RawMessage(tc.params))); got != tc.want {
			t.Errorf("%s %s: answered %s, want %s", tc.method, tc.params, got, tc.want)
		}
	}
	p.send(notification("x.unknown", nil), notification("x.notice", map[string]any{"a": 1}))
	if got := await(t, "notice", notices); got != `x.notice {"a":1}` {
		t.Errorf("got %s", got)
	}
}

// TestMaxHandlers: at most that many run, the others wait in order; neither the reader nor the other class waits with them.
func TestMaxHandlers(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, &Options{MaxHandlers: 2})
	begun, release := make(chan string, 8), make(chan struct{})
	s := createSession(t, c, &SessionConfig{SessionID: "s",
		OnHook: func(context.Context, HookCall) (any, error) { return nil, nil },
		Tools: []Tool{{Name: "t", Handler: func(_ context.Context, c ToolCall) (ToolResult, error) {
			begun <- c.RequestID
			<-release
			return ToolResult{}, nil
		}}}})
	sub := s.Subscribe()
	defer sub.Close()
	for i := range 6 {
		p.askTool("s", fmt.Sprint("r", i))
	}
	p.emit("s", "session.info", map[string]any{})
	for range 7 {
		next(t, sub)
	}
	first := map[string]bool{await(t, "first", begun): true, await(t, "second", begun): true}
	if !first["r0"] || !first["r1"] {
		t.Errorf("began with %v", first)
	}
	p.request("hooks.invoke", map[string]any{"sessionId": "s", "hookType": "agentStop"}) // the other class
	p.request("userInput.request", map[string]any{"sessionId": "s", "question": "q"})    // needs no handler
	// One that is resolved while it waits never begins; one that is aborted while it waits is answered without its handler.
	p.emit("s", "external_tool.completed", map[string]any{"requestId": "r3"})
	p.sync()
	if len(begun) != 0 {
		t.Fatalf("%s began beyond the limit", <-begun)
	}
	for _, want := range []string{"r2", "r4", "r5"} {
		release <- struct{}{}
		if got := await(t, want, begun); got != want {
			t.Errorf("%s began, want %s", got, want)
		}
	}
	p.askTool("s", "r6")
	p.sync()
	p.emit("s", "abort", map[string]any{})
	p.sync()
	close(release)
	answers := make(map[string]string)
	for i := range 6 {
		m := p.wait(hdlTool, i+1)
		answers[m.get("requestId").(string)] = string(m.Params)
	}
	hdlQuiet(t, p, s)
	if n := len(p.calls(hdlTool)); n != 6 || answers["r3"] != "" || !strings.Contains(answers["r6"], ErrAborted.Error()) || len(begun) != 0 {
		t.Errorf("%d answers, %d late calls: %v", n, len(begun), answers)
	}
}

// TestHandlerFlood: a peer that asks without end ends the connection, not the memory.
func TestHandlerFlood(t *testing.T) {
	leakCheck(t)
	l := limiter{max: 1}
	release := make(chan struct{})
	order := make(chan int, maxWaiting+1)
	l.run(func() { <-release })
	for i := range maxWaiting {
		if !l.run(func() { order <- i }) {
			t.Fatalf("call %d was refused", i)
		}
	}
	if l.run(func() {}) {
		t.Error("a call beyond the limit was taken")
	}
	close(release)
	ctx := testContext(t)
	for i := range maxWaiting {
		select {
		case got := <-order:
			if got != i {
				t.Fatalf("call %d came as number %d", got, i)
			}
		case <-ctx.Done():
			t.Fatalf("call %d did not come", i)
		}
	}

	c, p := newPeer(t, &Options{MaxHandlers: 1})
	b := newHdlBlock()
	createSession(t, c, &SessionConfig{SessionID: "s", Tools: []Tool{{Name: "t", Handler: b.tool}}})
	p.askTool("s", "r0")
	await(t, "tool", b.begun)
	c.agentWork.mu.Lock()
	c.agentWork.waiting = make([]func(), maxWaiting)
	for i := range c.agentWork.waiting {
		c.agentWork.waiting[i] = func() {}
	}
	c.agentWork.mu.Unlock()
	p.askTool("s", "r1")
	await(t, "client's end", c.Done())
	if err := c.Err(); !errors.Is(err, errFlood) {
		t.Errorf("ended with %v", err)
	}
}

// TestHandlersDuringStart: what the server asks before it has answered the start is served.
func TestHandlersDuringStart(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	p.handle("session.create", func(p *peer, m peerMessage) any {
		go func() {
			p.request("hooks.invoke", map[string]any{"sessionId": "s", "hookType": "sessionStart"})
			p.askPermission("s", "r")
			p.wait(hdlPermission, 1)
			p.answer(m.ID, map[string]any{"sessionId": "s"})
		}()
		return noAnswer
	})
	hooked := make(chan struct{}, 1)
	createSession(t, c, &SessionConfig{SessionID: "s", OnPermission: ApproveAll, OnHook: func(context.Context, HookCall) (any, error) {
		hooked <- struct{}{}
		return nil, nil
	}})
	await(t, "hook", hooked)
}

// TestSessionEndHook: the server asks it while the release is on its way, and waits for it.
func TestSessionEndHook(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	b := newHdlBlock()
	s := createSession(t, c, &SessionConfig{SessionID: "s", Hooks: &Hooks{SessionEnd: func(ctx context.Context, in SessionEndInput) (SessionEndOutput, error) {
		return SessionEndOutput{SessionSummary: "sum"}, b.wait(ctx)
	}}})
	answers := make(chan string, 1)
	p.handle("session.destroy", func(p *peer, m peerMessage) any {
		go func() {
			answer := p.request("hooks.invoke", map[string]any{"sessionId": "s", "hookType": "sessionEnd", "input": map[string]any{}})
			answers <- string(answer.Result)
			p.answer(m.ID, map[string]any{"success": true})
		}()
		return noAnswer
	})
	left := async(func() error { return s.Disconnect(testContext(t)) })
	if ctx := await(t, "hook", b.begun); ctx.Err() != nil {
		t.Errorf("its context has ended: %v", context.Cause(ctx))
	}
	close(b.release)
	if got, want := await(t, "hook's answer", answers), `{"output":{"sessionSummary":"sum"}}`; got != want {
		t.Errorf("answered %s, want %s", got, want)
	}
	if err := await(t, "Disconnect", left); err != nil {
		t.Error(err)
	}
}

// TestQuestionAnsweredElsewhere: the server tells of the end of a question without naming its request.
func TestQuestionAnsweredElsewhere(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	b := newHdlBlock()
	s := createSession(t, c, &SessionConfig{SessionID: "s",
		OnUserInput: func(ctx context.Context, _ UserInputRequest) (UserInputResponse, error) {
			return UserInputResponse{}, b.wait(ctx)
		},
		OnExitPlanMode: func(context.Context, ExitPlanModeRequest) (ExitPlanModeResult, error) {
			return ExitPlanModeResult{Approved: true}, nil
		}})
	question := map[string]any{"sessionId": "s", "question": "q"}
	completed := func() { p.emit("s", "user_input.completed", map[string]any{"requestId": "r"}); p.sync() }
	one := p.ask("userInput.request", question)
	await(t, "question", b.begun)
	p.request("exitPlanMode.request", map[string]any{"sessionId": "s"})
	p.emit("s", "exit_plan_mode.completed", map[string]any{"requestId": "plan"}) // another topic
	p.sync()
	two := p.ask("userInput.request", question)
	await(t, "second question", b.begun)
	completed() // of either
	if len(b.causes) != 0 {
		t.Fatal("a question was ended though nobody can tell which one was answered")
	}
	b.release <- struct{}{}
	b.release <- struct{}{}
	await(t, "answer", one)
	await(t, "answer", two)
	three := p.ask("userInput.request", question)
	await(t, "third question", b.begun)
	completed()
	completed() // of our own answers to the first two
	if len(b.causes) != 0 {
		t.Fatal("our own answer to one question has ended another")
	}
	completed()
	if cause := await(t, "handler's context", b.causes); !errors.Is(cause, errResolved) {
		t.Errorf("cause is %v", cause)
	}
	if got, want := hdlOutcome(t, await(t, "answer", three)), `{"noResponse":true}`; got != want {
		t.Errorf("answered %s, want %s", got, want)
	}
	_ = s
}

// TestTraceContext follows a trace from a tool call into what its handler calls.
func TestTraceContext(t *testing.T) {
	leakCheck(t)
	for _, tc := range []struct {
		name  string
		opts  *Options
		m     Message
		trace string // of the message
	}{
		{"handler's", nil, Message{}, "00-a-b-01 k=v"},
		{"message's own", nil, Message{Traceparent: "own"}, "own <nil>"},
		{"option", &Options{TraceContext: func(context.Context) (string, string) { return "option", "" }}, Message{}, "option <nil>"},
		{"option says none", &Options{TraceContext: func(context.Context) (string, string) { return "", "" }}, Message{}, "<nil> <nil>"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, p := newPeer(t, tc.opts)
			started := make(chan *Session, 1)
			createTool := Tool{Name: "t", Handler: func(ctx context.Context, _ ToolCall) (ToolResult, error) {
				s := <-started
				if _, err := s.Send(ctx, tc.m); err != nil {
					return ToolResult{}, err
				}
				_, err := c.CreateSession(ctx, nil)
				return ToolResult{}, err
			}}
			started <- createSession(t, c, &SessionConfig{SessionID: "s", Tools: []Tool{createTool}})
			p.emit("s", "external_tool.requested", map[string]any{"requestId": "r", "toolName": "t", "toolCallId": "c", "traceparent": "00-a-b-01", "tracestate": "k=v"})
			if got := p.wait(hdlTool, 1); got.get("result") != "" {
				t.Fatalf("tool: %s", got.Params)
			}
			of := func(m peerMessage) string { return fmt.Sprint(m.get("traceparent"), " ", m.get("tracestate")) }
			if got := of(p.wait("session.send", 1)); got != tc.trace {
				t.Errorf("the message carries %s, want %s", got, tc.trace)
			}
			if got := of(p.wait("session.create", 2)); tc.m.Traceparent == "" && got != tc.trace {
				t.Errorf("the new session carries %s, want %s", got, tc.trace)
			}
		})
	}
	if parent, state := TraceContextFrom(context.Background()); parent != "" || state != "" {
		t.Errorf("a ctx without trace has %q %q", parent, state)
	}
}

// TestCase057PanicsStayAtHome: a handler's panic goes to the log, with its stack, and takes nothing else along; one in a loop over events is its
// goroutine's own.
func TestCase057PanicsStayAtHome(t *testing.T) {
	leakCheck(t)
	var log hdlLog
	c, p := newPeer(t, &Options{Logger: log.logger()})
	s := createSession(t, c, &SessionConfig{SessionID: "s", OnPermission: func(context.Context, PermissionRequest) (PermissionDecision, error) { panic("bang") }})
	sub, other := s.Subscribe(), s.Subscribe()
	defer other.Close()
	p.askPermission("s", "r")
	p.wait(hdlPermission, 1)
	func() {
		defer func() {
			if got := recover(); got != "loop" {
				t.Errorf("recovered %v", got)
			}
			sub.Close()
		}()
		for range sub.All(testContext(t)) {
			panic("loop")
		}
	}()
	if e := next(t, other); e.Type != EventPermissionRequested {
		t.Errorf("got %s", e.Type)
	}
	hdlQuiet(t, p, s)
	if text := log.String(); !strings.Contains(text, "bang") || !strings.Contains(text, "TestCase057") {
		t.Errorf("log:\n%s", text)
	}
}

// TestCase084NotLoggedIn: the same error from all that may tell.
func TestCase084NotLoggedIn(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	p.handle("auth.getStatus", func(*peer, peerMessage) any {
		return map[string]any{"isAuthenticated": false, "statusMessage": "run login"}
	})
	status, err := c.AuthStatus(testContext(t))
	if err = errors.Join(err, status.Err()); !errors.Is(err, ErrAuthentication) || !strings.Contains(err.Error(), "run login") {
		t.Errorf("status: %v", err)
	}
	if err := (AuthStatus{IsAuthenticated: true}).Err(); err != nil {
		t.Errorf("logged in: %v", err)
	}
	s := createSession(t, c, nil)
	turn := async(func() error { _, err := s.SendAndWait(testContext(t), Message{}); return err })
	p.wait("session.send", 1)
	p.sync()
	p.emit(s.ID(), "user.message", map[string]any{"messageId": "m1"})
	p.emit(s.ID(), "session.error", map[string]any{"errorType": "authentication", "message": "bad key", "statusCode": 401})
	if err := await(t, "turn", turn); !errors.Is(err, ErrAuthentication) || !strings.Contains(err.Error(), "bad key") {
		t.Errorf("turn: %v", err)
	}
	p.refuse("session.create", codeInternal, "Not authenticated")
	if _, err := c.CreateSession(testContext(t), nil); !errors.Is(err, ErrAuthentication) || !strings.Contains(err.Error(), "Not authenticated") {
		t.Errorf("create: %v", err)
	}
}

// TestCase074NameClash: two tools of one name are refused before any traffic; the override is sent when it is set.
func TestCase074NameClash(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	if _, err := c.CreateSession(testContext(t), &SessionConfig{Tools: []Tool{{Name: "t"}, {Name: "t"}}}); !errors.Is(err, ErrInvalidConfig) {
		t.Errorf("got %v", err)
	}
	if _, err := c.CreateSession(testContext(t), &SessionConfig{Tools: []Tool{{Name: ""}}}); !errors.Is(err, ErrInvalidConfig) {
		t.Errorf("empty name: got %v", err)
	}
	if n := len(p.calls("session.create")); n != 0 {
		t.Errorf("%d requests were written", n)
	}
	createSession(t, c, &SessionConfig{Tools: []Tool{{Name: "bash", OverridesBuiltIn: true}, {Name: "t"}}})
	const none = `"parameters":{"type":"object","properties":{}}`
	want := `[{"name":"bash",` + none + `,"overridesBuiltInTool":true},{"name":"t",` + none + `}]`
	if got := string(member(p.wait("session.create", 1).Params, "tools")); got != want {
		t.Errorf("sent %s, want %s", got, want)
	}
}

// TestPermissionApproval: what a request would let pass from now on, as the server wants it.
func TestPermissionApproval(t *testing.T) {
	for _, tc := range []struct {
		request PermissionRequest
		want    string
	}{
		{PermissionRequest{Kind: PermissionShell, Commands: []PermissionCommand{{Identifier: "ls"}, {Identifier: "cat"}}}, `{"commandIdentifiers":["ls","cat"],"kind":"commands"}`},
		{PermissionRequest{Kind: PermissionRead, Path: "x"}, `{"kind":"read"}`},
		{PermissionRequest{Kind: PermissionWrite}, `{"kind":"write"}`},
		{PermissionRequest{Kind: PermissionMemory}, `{"kind":"memory"}`},
		{PermissionRequest{Kind: PermissionMCP, ServerName: "m", ToolName: "t"}, `{"kind":"mcp","serverName":"m","toolName":"t"}`},
		{PermissionRequest{Kind: PermissionCustomTool, ToolName: "t"}, `{"kind":"custom-tool","toolName":"t"}`},
		{PermissionRequest{Kind: PermissionExtension, Operation: "o"}, `{"kind":"extension-management","operation":"o"}`},
		{PermissionRequest{Kind: PermissionWorkflow, ApprovalKey: "k"}, `{"approvalKey":"k","kind":"workflow"}`},
		{PermissionRequest{Kind: PermissionExtensionAccess, ExtensionName: "e"}, `{"extensionName":"e","kind":"extension-permission-access"}`},
		{PermissionRequest{Kind: PermissionExtensionEnv, ExtensionName: "e", EnvironmentVariables: []string{"V"}}, `{"environmentVariables":["V"],"extensionName":"e","kind":"extension-env-access"}`},
		{PermissionRequest{Kind: PermissionURL}, ``},
		{PermissionRequest{Kind: "future"}, ``},
	} {
		raw, err := json.Marshal(ApproveForSession(tc.request.Approval()))
		if got := string(member(raw, "approval")); err != nil || got != tc.want {
			t.Errorf("%s: %s, %v, want %s", tc.request.Kind, got, err, tc.want)
		}
	}
	for _, d := range []PermissionDecision{{}, NoResult(), ApproveForLocation(PermissionApproval{Kind: "mcp"}, "k")} {
		if raw, err := json.Marshal(d); err == nil {
			t.Errorf("%+v encodes as %s", d, raw)
		}
	}
}

// TestLateToolAnswer: what a handler could not say, the host says later by a call of its own.
func TestLateToolAnswer(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, &SessionConfig{SessionID: "s"})
	ctx := testContext(t)
	if err := s.Call(ctx, hdlTool, map[string]any{"requestId": "r", "result": ToolResult{Text: "x"}}, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Call(ctx, hdlPermission, map[string]any{"requestId": "r", "result": Reject("no")}, nil); err != nil {
		t.Fatal(err)
	}
	for method, want := range map[string]string{hdlTool: `{"textResultForLlm":"x"}`, hdlPermission: `{"feedback":"no","kind":"reject"}`} {
		if got := string(member(p.wait(method, 1).Params, "result")); got != want {
			t.Errorf("%s: sent %s, want %s", method, got, want)
		}
	}
}

func TestMCPAuthDoesNotPrintSecrets(t *testing.T) {
	r := MCPAuthRequest{ServerName: "srv", Client: &MCPAuthClient{ClientID: "id", ClientSecret: "hush-hush"},
		Response: &MCPAuthHTTPResponse{StatusCode: 401, Headers: []MCPAuthHeader{{"X-Key", "hush-hush"}}}}
	raw, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("%v %+v %#v %s %s %+v %+v %+v", r, r, r, &r, raw, *r.Client, r.Response.Headers, r.Response)
	if strings.Contains(text, "hush") || !strings.Contains(text, "srv") {
		t.Errorf("prints %s", text)
	}
}

type (
	hdlColor  string
	hdlText   struct{ a, b int }
	hdlCustom struct{ X int }
	hdlNode   struct {
		Name string             `json:"name"`
		Kids []*hdlNode         `json:"kids,omitempty"`
		By   map[string]hdlNode `json:"by,omitempty"`
	}
	hdlTree struct {
		Root  hdlNode      `json:"root"`
		Other hdlPair[int] `json:"other"`
	}
	hdlPair[T any] struct {
		Value T           `json:"value"`
		Next  *hdlPair[T] `json:"next"`
	}
	hdlLoop     []hdlLoop
	hdlPointer  *hdlPointer
	HdlEmbedded struct {
		Inner  int
		Hidden int `json:"shared"`
	}
	HdlDeep struct {
		HdlEmbedded
		Twice int
	}
	hdlLower struct{ Promoted int }
)

func (hdlText) MarshalText() ([]byte, error)  { return nil, nil }
func (*hdlText) UnmarshalText([]byte) error   { return nil }
func (*hdlCustom) UnmarshalJSON([]byte) error { return nil }

func TestSchemaFor(t *testing.T) {
	for _, tc := range []struct {
		name string
		got  func() (json.RawMessage, error)
		want string
	}{
		{"empty", SchemaFor[struct{}], `{"type":"object","properties":{}}`},
		{"kinds", SchemaFor[struct {
			S string
			B bool
			I int8
			U uint64
			F float32
			N json.Number
			A any
			R json.RawMessage
			D time.Duration
		}], `{"type":"object","properties":{"S":{"type":"string"},"B":{"type":"boolean"},"I":{"type":"integer"},"U":{"type":"integer"},"F":{"type":"number"},"N":{"type":"number"},"A":{},"R":{},"D":{"type":"integer"}},"required":["S","B","I","U","F","N","A","R","D"]}`},
		{"tags", SchemaFor[struct {
			A int  `json:"a" description:"the <first>"`
			B int  `json:"b,omitempty"`
			C *int `json:"c"`
			D int  `json:"-"`
			E int  `json:"-,"`
			F int  `json:",string"`
			G int  `json:"g,omitzero"`
			h int
			K hdlColor `enum:"red,blue" json:"k"`
			L []int    `enum:"1,2" json:"l"`
			M *float64 `enum:"1.5" json:"m"`
			O int      `json:"o,string" enum:"1,2"`
		}], `{"type":"object","properties":{"a":{"type":"integer","description":"the <first>"},"b":{"type":"integer"},"c":{"type":"integer"},"-":{"type":"integer"},"F":{"type":"string"},"g":{"type":"integer"},"k":{"type":"string","enum":["red","blue"]},"l":{"type":"array","items":{"type":"integer","enum":[1,2]}},"m":{"type":"number","enum":[1.5]},"o":{"type":"string","enum":["1","2"]}},"required":["a","-","F","k","l","o"]}`},
		{"lists", SchemaFor[struct {
			A []string
			B [2]bool
			C []byte
			D map[string]int
			E map[int][]string
			F map[hdlText]bool
		}], `{"type":"object","properties":{"A":{"type":"array","items":{"type":"string"}},"B":{"type":"array","items":{"type":"boolean"},"minItems":2,"maxItems":2},"C":{"type":"string","contentEncoding":"base64"},"D":{"type":"object","additionalProperties":{"type":"integer"}},"E":{"type":"object","additionalProperties":{"type":"array","items":{"type":"string"}}},"F":{"type":"object","additionalProperties":{"type":"boolean"}}},"required":["A","B","C","D","E","F"]}`},
		{"own forms", SchemaFor[struct {
			T time.Time
			P *time.Time
			X hdlText
			J hdlCustom
			B *big.Int
		}], `{"type":"object","properties":{"T":{"type":"string","format":"date-time"},"P":{"type":"string","format":"date-time"},"X":{"type":"string"},"J":{},"B":{}},"required":["T","X","J"]}`},
		{"embedded", SchemaFor[struct {
			HdlDeep
			*HdlEmbedded
			hdlLower
			Named  hdlLower
			Shared int `json:"shared"`
		}], `{"type":"object","properties":{"Twice":{"type":"integer"},"Inner":{"type":"integer"},"Promoted":{"type":"integer"},"Named":{"type":"object","properties":{"Promoted":{"type":"integer"}},"required":["Promoted"]},"shared":{"type":"integer"}},"required":["Twice","Promoted","Named","shared"]}`},
		{"recursive root", SchemaFor[*hdlNode], `{"type":"object","properties":{"name":{"type":"string"},"kids":{"type":"array","items":{"$ref":"#"}},"by":{"type":"object","additionalProperties":{"$ref":"#"}}},"required":["name"]}`},
		{"recursive inside", SchemaFor[hdlTree], `{"type":"object","properties":{"root":{"$ref":"#/$defs/hdlNode"},"other":{"$ref":"#/$defs/hdlPair_int_"}},"required":["root","other"],"$defs":{"hdlNode":{"type":"object","properties":{"name":{"type":"string"},"kids":{"type":"array","items":{"$ref":"#/$defs/hdlNode"}},"by":{"type":"object","additionalProperties":{"$ref":"#/$defs/hdlNode"}}},"required":["name"]},"hdlPair_int_":{"type":"object","properties":{"value":{"type":"integer"},"next":{"$ref":"#/$defs/hdlPair_int_"}},"required":["value"]}}}`},
		{"recursive list", SchemaFor[hdlLoop], `{"type":"array","items":{"$ref":"#"}}`},
		{"scalar", SchemaFor[**string], `{"type":"string"}`},
	} {
		got, err := tc.got()
		if err != nil || string(got) != tc.want {
			t.Errorf("%s: %v\n got %s\nwant %s", tc.name, err, got, tc.want)
		}
	}
	for name, f := range map[string]func() (json.RawMessage, error){
		"chan":              SchemaFor[chan int],
		"func in a list":    SchemaFor[struct{ F []func() }],
		"complex":           SchemaFor[map[string]complex128],
		"map key":           SchemaFor[map[bool]int],
		"interface":         SchemaFor[struct{ R io.Reader }],
		"pointer to itself": SchemaFor[hdlPointer],
		"enum of objects": SchemaFor[struct {
			X hdlLower `enum:"a"`
		}],
		"enum no number": SchemaFor[struct {
			X int `enum:"a"`
		}],
	} {
		if raw, err := f(); !errors.Is(err, ErrInvalidConfig) {
			t.Errorf("%s: %s, %v", name, raw, err)
		}
	}
}

// TestNewToolBadType: a tool that cannot be declared is found out before anything is written.
func TestNewToolBadType(t *testing.T) {
	leakCheck(t)
	c, _ := newPeer(t, nil)
	for name, tool := range map[string]Tool{
		"no schema": NewTool("t", "", func(context.Context, struct{ C chan int }) (string, error) { return "", nil }),
		"no object": NewTool("t", "", func(context.Context, string) (string, error) { return "", nil }),
		"list":      NewTool("t", "", func(context.Context, []int) (string, error) { return "", nil }),
	} {
		if _, err := c.PrepareSession(&SessionConfig{Tools: []Tool{tool}}); !errors.Is(err, ErrInvalidConfig) || !strings.Contains(err.Error(), "Tools[0]") {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, tool := range map[string]Tool{
		"any":     NewTool("t", "", func(context.Context, any) (string, error) { return "", nil }),
		"raw":     NewTool("t", "", func(context.Context, json.RawMessage) (string, error) { return "", nil }),
		"map":     NewTool("t", "", func(context.Context, map[string]any) (string, error) { return "", nil }),
		"pointer": NewTool("t", "", func(context.Context, *hdlNode) (string, error) { return "", nil }),
		"no func": NewTool[struct{}, string]("t", "", nil),
	} {
		if _, err := c.PrepareSession(&SessionConfig{Tools: []Tool{tool}}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// FuzzSchema builds types out of the input, and checks that what encoding/json writes for a value of a type is what its schema describes.
func FuzzSchema(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17})
	f.Add([]byte{17, 17, 17, 17, 17, 1, 2, 3, 0, 9, 14, 3, 15, 4, 16, 5})
	f.Add([]byte("struct of structs of lists"))
	f.Fuzz(func(t *testing.T, b []byte) {
		typ := hdlType(&b, 4)
		raw, top, err := schemaOf(typ)
		if err != nil {
			if !errors.Is(err, ErrInvalidConfig) {
				t.Fatalf("%v: %v", typ, err)
			}
			return
		}
		value, err := json.Marshal(reflect.New(typ).Elem().Interface())
		if err != nil {
			t.Fatalf("%v has a schema, %s, and no JSON: %v", typ, raw, err)
		}
		var s schemaCheck
		if err := json.Unmarshal(raw, &s); err != nil {
			t.Fatalf("%v: schema %s: %v", typ, raw, err)
		}
		if s.Type != top {
			t.Fatalf("%v: schema %s is of type %q", typ, raw, top)
		}
		s.check(t, typ, value)
	})
}

// hdlType takes a type from b.
func hdlType(b *[]byte, depth int) reflect.Type {
	take := func() int {
		if len(*b) == 0 {
			return 0
		}
		n := int((*b)[0])
		*b = (*b)[1:]
		return n
	}
	basic := []reflect.Type{reflect.TypeFor[string](), reflect.TypeFor[int](), reflect.TypeFor[bool](), reflect.TypeFor[float64](), reflect.TypeFor[uint8](),
		reflect.TypeFor[any](), reflect.TypeFor[json.RawMessage](), reflect.TypeFor[time.Time](), reflect.TypeFor[hdlNode](), reflect.TypeFor[hdlText](),
		reflect.TypeFor[chan int](), reflect.TypeFor[func()](), reflect.TypeFor[complex64](), reflect.TypeFor[hdlTree]()}
	switch n := take() % (len(basic) + 5); {
	case n < len(basic):
		return basic[n]
	case depth == 0:
		return basic[0]
	case n == len(basic):
		return reflect.SliceOf(hdlType(b, depth-1))
	case n == len(basic)+1:
		return reflect.ArrayOf(take()%4, hdlType(b, depth-1))
	case n == len(basic)+2:
		return reflect.MapOf(basic[take()%2], hdlType(b, depth-1))
	case n == len(basic)+3:
		return reflect.PointerTo(hdlType(b, depth-1))
	}
	var fields []reflect.StructField
	for i := range take() % 5 {
		tag := []string{``, `json:"x"`, `json:",omitempty"`, `json:"-"`, `json:"y,string"`, `description:"d"`}[take()%6]
		fields = append(fields, reflect.StructField{Name: fmt.Sprint("F", i), Type: hdlType(b, depth-1), Tag: reflect.StructTag(tag)})
	}
	return reflect.StructOf(fields)
}

type schemaCheck struct {
	Ref                  string                 `json:"$ref"`
	Type                 string                 `json:"type"`
	Properties           map[string]schemaCheck `json:"properties"`
	Required             []string               `json:"required"`
	AdditionalProperties *schemaCheck           `json:"additionalProperties"`
	Items                *schemaCheck           `json:"items"`
}

func (s schemaCheck) check(t *testing.T, typ reflect.Type, value json.RawMessage) {
	kinds := map[byte][]string{'"': {"string"}, '{': {"object"}, '[': {"array"}, 't': {"boolean"}, 'f': {"boolean"}}
	if string(value) == "null" || s.Ref != "" || s.Type == "" {
		return // nil pointers, lists and maps; what refers elsewhere; anything
	}
	want, ok := kinds[value[0]]
	if !ok {
		want = []string{"integer", "number"}
	}
	if !slices.Contains(want, s.Type) {
		t.Fatalf("%v: %s where the schema says %s", typ, value, s.Type)
	}
	switch value[0] {
	case '[':
		var list []json.RawMessage
		_ = json.Unmarshal(value, &list)
		for _, v := range list {
			s.Items.check(t, typ, v)
		}
	case '{':
		var object map[string]json.RawMessage
		_ = json.Unmarshal(value, &object)
		for name, v := range object {
			p, ok := s.Properties[name]
			if !ok {
				t.Fatalf("%v: the schema lacks %q", typ, name)
			}
			p.check(t, typ, v)
		}
		for _, name := range s.Required {
			if _, ok := object[name]; !ok {
				t.Fatalf("%v: %q is required and not written", typ, name)
			}
		}
	}
}

// hdlReal is a session of the real CLI with a model that does what prompts say.
type hdlReal struct {
	client *Client
	model  *modelServer
}

func (r hdlReal) config(t *testing.T, cfg SessionConfig) *SessionConfig {
	cfg.Model, cfg.WorkingDirectory = "fake-model", t.TempDir()
	cfg.Provider = &ProviderConfig{Type: "openai", WireAPI: "completions", BaseURL: r.model.URL + "/v1", APIKey: "dummy"}
	return &cfg
}

// hdlContext is testContext with the patience that a busy machine needs for whole turns.
func hdlContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// ask runs a turn and returns the final message and the outcomes of its tool calls.
func (r hdlReal) ask(t *testing.T, cfg SessionConfig, prompt string) (text string, tools []*ToolExecutionComplete, err error) {
	t.Helper()
	ctx := hdlContext(t)
	s, err := r.client.CreateSession(ctx, r.config(t, cfg))
	if err != nil {
		t.Fatal(err)
	}
	for e, errTurn := range s.Ask(ctx, Message{Prompt: prompt}) {
		if err = errTurn; err != nil {
			break
		}
		switch p := e.Payload().(type) {
		case *AssistantMessage:
			text = p.Content
		case *ToolExecutionComplete:
			tools = append(tools, p)
		}
	}
	if err := s.Disconnect(ctx); err != nil {
		t.Error(err)
	}
	return text, tools, err
}

// TestRealHandlers lets the real CLI ask.
func TestRealHandlers(t *testing.T) {
	r := hdlReal{startReal(t, Options{}), newModelServer(t)}
	tool := func(f func() (string, error)) SessionConfig {
		type in struct {
			City string `json:"city" description:"where" enum:"Oslo,Rome"`
		}
		w := NewTool("weather", "Tells the weather", func(_ context.Context, in in) (string, error) {
			if in.City != "Oslo" {
				return "", fmt.Errorf("city is %q", in.City)
			}
			return f()
		})
		w.SkipPermission = true
		return SessionConfig{Tools: []Tool{w}}
	}
	const call = `call: weather {"city":"Oslo"}`
	for _, tc := range []struct {
		name, prompt string
		cfg          SessionConfig
		want         string // in the final message; "" when there is none
		code         string // of the tool's error
	}{
		{"tool", call, tool(func() (string, error) { return "sunny", nil }), "tool said: sunny", ""},
		{"tool fails", call, tool(func() (string, error) { return "", errors.New("no weather") }), "tool said: no weather", "failure"},
		{"tool panics", call, tool(func() (string, error) { panic("bang") }), "tool said: the host's handler panicked", "failure"},
		{"bad arguments", `call: weather {"city":7}`, tool(func() (string, error) { return "sunny", nil }), "tool said: arguments of weather", "failure"},
		{"two tools", call[:4] + "s" + call[4:] + " ; " + call[6:], tool(func() (string, error) { return "sunny", nil }), "tool said: sunny | sunny", ""},
		{"structured result", call, SessionConfig{Tools: []Tool{{Name: "weather", SkipPermission: true, Handler: func(context.Context, ToolCall) (ToolResult, error) {
			return ToolResult{Text: "no entry", Type: ToolDenied}, nil
		}}}}, "tool said: no entry", "denied"},
		{"binary result", call, SessionConfig{Tools: []Tool{{Name: "weather", SkipPermission: true, Handler: func(context.Context, ToolCall) (ToolResult, error) {
			return ToolResult{Text: "map", SessionLog: "log", Telemetry: map[string]any{"metrics": map[string]any{"n": 1}}, Binary: []ToolBinary{NewToolBinary("text/plain", []byte("x"))}}, nil
		}}}}, "tool said: map", ""},

		{"approve", `call: bash {"command":"echo made","description":"make"}`, SessionConfig{OnPermission: ApproveAll}, "made", ""},
		{"approve for the session", `call: bash {"command":"touch a && echo made","description":"make"}`,
			SessionConfig{OnPermission: func(_ context.Context, r PermissionRequest) (PermissionDecision, error) {
				return ApproveForSession(r.Approval()), nil
			}}, "made", ""},
		{"reject", `call: bash {"command":"touch a","description":"make"}`, hdlDecide(func() (PermissionDecision, error) { return Reject("not today"), nil }), "not today", "denied"},
		{"deny all", `call: bash {"command":"touch a","description":"make"}`, SessionConfig{OnPermission: DenyAll}, "denied by the host's policy", "denied"},
		{"nobody decides", `call: bash {"command":"touch a","description":"make"}`, hdlDecide(func() (PermissionDecision, error) { panic("bang") }), "tool said:", "denied"},
		{"zero decision", `call: bash {"command":"touch a","description":"make"}`, hdlDecide(func() (d PermissionDecision, err error) { return }), "tool said:", "denied"},

		{"question", `call: ask_user {"question":"Which?","choices":["red","blue"]}`,
			SessionConfig{OnUserInput: func(_ context.Context, r UserInputRequest) (UserInputResponse, error) {
				return UserInputResponse{Answer: r.Choices[1]}, nil
			}}, "blue", ""},
		{"question without answer", `call: ask_user {"question":"Which?","choices":["red","blue"]}`,
			SessionConfig{OnUserInput: func(context.Context, UserInputRequest) (UserInputResponse, error) { panic("bang") }}, "unable to respond", ""},

		{"hook denies", call, func() SessionConfig {
			cfg := tool(func() (string, error) { t.Error("a denied tool ran"); return "", nil })
			cfg.Hooks = &Hooks{PreToolUse: func(context.Context, PreToolUseInput) (PreToolUseOutput, error) {
				return PreToolUseOutput{Decision: HookDeny, DecisionReason: "policy"}, nil
			}}
			return cfg
		}(), "policy", "denied"},
		{"hook fails", call, func() SessionConfig {
			cfg := tool(func() (string, error) { t.Error("a denied tool ran"); return "", nil })
			cfg.Hooks = &Hooks{PreToolUse: func(context.Context, PreToolUseInput) (PreToolUseOutput, error) { panic("bang") }}
			return cfg
		}(), "panicked", "denied"},
		{"hooks change", `call: weather {"city":"Rome"}`, func() SessionConfig {
			cfg := tool(func() (string, error) { return "sunny", nil })
			cfg.Hooks = &Hooks{
				PreToolUse: func(context.Context, PreToolUseInput) (PreToolUseOutput, error) {
					return PreToolUseOutput{Decision: HookAllow, ModifiedArgs: map[string]string{"city": "Oslo"}}, nil
				},
				PostToolUse: func(_ context.Context, in PostToolUseInput) (PostToolUseOutput, error) {
					var old ToolResult
					err := json.Unmarshal(in.ToolResult, &old)
					return PostToolUseOutput{ModifiedResult: ToolResult{Text: "very " + old.Text, Type: ToolSuccess}}, err
				},
			}
			return cfg
		}(), "tool said: very sunny", ""},
		{"prompt hook", "say: original", SessionConfig{Hooks: &Hooks{UserPromptSubmitted: func(context.Context, UserPromptSubmittedInput) (UserPromptSubmittedOutput, error) {
			return UserPromptSubmittedOutput{ModifiedPrompt: "say: rewritten"}, nil
		}}}, "rewritten", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			text, tools, err := r.ask(t, tc.cfg, tc.prompt)
			if err != nil || !strings.Contains(text, tc.want) {
				t.Errorf("the turn ended with %q, %v, want %q", text, err, tc.want)
			}
			for _, result := range tools {
				switch {
				case tc.code == "" && !result.Success:
					t.Errorf("tool: %+v", *result.Error)
				case tc.code != "" && (result.Error == nil || result.Error.Code != tc.code):
					t.Errorf("tool: %+v, want code %s", result, tc.code)
				}
			}
		})
	}

	t.Run("transform", func(t *testing.T) {
		before := len(r.model.Requests())
		seen := make(chan string, 8)
		cfg := SessionConfig{Transforms: map[string]func(context.Context, string) (string, error){
			"identity": func(_ context.Context, content string) (string, error) {
				seen <- content
				return "MARK " + content, nil
			},
			"tone": func(context.Context, string) (string, error) { panic("bang") },
		}}
		if text, _, err := r.ask(t, cfg, "say: hi"); err != nil || text != "hi" {
			t.Errorf("got %q, %v", text, err)
		}
		if len(await(t, "section", seen)) == 0 {
			t.Error("the section was empty")
		}
		if body := r.model.Requests()[before].Body; !bytes.Contains(body, []byte("MARK ")) {
			t.Errorf("the model's prompt has no mark: %.500s", body)
		}
	})

	t.Run("command", func(t *testing.T) {
		ctx := hdlContext(t)
		s, err := r.client.CreateSession(ctx, r.config(t, SessionConfig{Commands: []Command{{Name: "deploy", Handler: func(_ context.Context, c CommandCall) error {
			return fmt.Errorf("no deploy to %s", c.Args)
		}}}}))
		if err != nil {
			t.Fatal(err)
		}
		var result struct{ Error string }
		if err := s.Call(ctx, "session.commands.execute", map[string]any{"commandName": "deploy", "args": "prod"}, &result); err != nil || result.Error != "no deploy to prod" {
			t.Errorf("got %+v, %v", result, err)
		}
	})

	t.Run("elicitation", func(t *testing.T) {
		ctx := hdlContext(t)
		s, err := r.client.CreateSession(ctx, r.config(t, SessionConfig{OnElicitation: func(_ context.Context, r ElicitationRequest) (ElicitationResult, error) {
			return ElicitationResult{ElicitationAccept, map[string]any{"name": r.Message}}, nil
		}}))
		if err != nil {
			t.Fatal(err)
		}
		schema := json.RawMessage(`{"type":"object","properties":{"name":{"type":"string"}}}`)
		got, err := s.UI().Elicit(ctx, "who", schema)
		if err != nil || got.Action != ElicitationAccept || got.Content["name"] != "who" {
			t.Errorf("got %+v, %v", got, err)
		}
	})

	t.Run("abort", func(t *testing.T) {
		ctx := hdlContext(t)
		b := newHdlBlock()
		s, err := r.client.CreateSession(ctx, r.config(t, SessionConfig{Tools: []Tool{{Name: "t", SkipPermission: true, Handler: b.tool}}}))
		if err != nil {
			t.Fatal(err)
		}
		turn := async(func() error { _, err := s.SendAndWait(ctx, Message{Prompt: "call: t {}"}); return err })
		select {
		case <-b.begun:
		case <-ctx.Done():
			t.Fatal("the tool was not called")
		}
		if err := s.Abort(ctx); err != nil {
			t.Fatal(err)
		}
		if cause := await(t, "tool's context", b.causes); !errors.Is(cause, ErrAborted) {
			t.Errorf("cause is %v", cause)
		}
		if err := await(t, "turn", turn); !errors.Is(err, ErrAborted) {
			t.Errorf("turn: %v", err)
		}
		if m, err := s.SendAndWait(ctx, Message{Prompt: "say: alive"}); err != nil || m.Content != "alive" {
			t.Errorf("after the abort: %+v, %v", m, err)
		}
	})
}

// TestRealPendingTool kills the CLI while a tool is pending, and answers the call to its successor.
// stored waits until the server has stored an event with this text, which it does a little after it has sent the event.
func stored(ctx context.Context, t testing.TB, home, id, text string) {
	t.Helper()
	if !poll(ctx, func() bool {
		journal, _ := os.ReadFile(filepath.Join(home, "session-state", id, "events.jsonl"))
		return strings.Contains(string(journal), text)
	}) {
		t.Fatalf("%q was not stored", text)
	}
}

func TestRealPendingTool(t *testing.T) {
	model, home, ctx := newModelServer(t), t.TempDir(), hdlContext(t)
	r := hdlReal{startReal(t, Options{BaseDir: home}), model}
	calls := make(chan ToolCall, 1)
	cfg := r.config(t, SessionConfig{Tools: []Tool{{Name: "t", SkipPermission: true, Handler: func(ctx context.Context, c ToolCall) (ToolResult, error) {
		calls <- c
		<-ctx.Done()
		return ToolResult{}, ctx.Err()
	}}}})
	s, err := r.client.CreateSession(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Send(ctx, Message{Prompt: "call: t {}"}); err != nil {
		t.Fatal(err)
	}
	var call ToolCall
	select {
	case call = <-calls:
	case <-ctx.Done():
		t.Fatal("the tool was not called")
	}
	stored(ctx, t, home, s.ID(), call.RequestID)
	if _, err := r.client.ForceStopAndWait(ctx); err != nil {
		t.Fatal(err)
	}
	r.client = startReal(t, Options{BaseDir: home})
	cfg.ContinuePendingWork = true
	p, err := r.client.PrepareResumeSession(s.ID(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	events := p.Events(ctx)
	if s, err = p.Start(ctx); err != nil {
		t.Fatal(err)
	}
	if err := s.AnswerToolCall(ctx, call.RequestID, ToolResult{Text: "late"}); err != nil {
		t.Fatal(err)
	}
	var refused *RPCError
	if err := s.AnswerToolCall(ctx, call.RequestID, ToolResult{Text: "later"}); !errors.As(err, &refused) {
		t.Errorf("a second answer: %v", err)
	}
	text := ""
	for e, err := range events {
		if err != nil {
			t.Fatal(err)
		}
		if m, ok := e.Payload().(*AssistantMessage); ok {
			text = m.Content
		}
		if e.Type == EventSessionIdle {
			break
		}
	}
	if text != "tool said: late" || len(calls) != 0 {
		t.Errorf("the turn ended with %q, the tool was called %d times more", text, len(calls))
	}
}

// fill sets everything below v to values that differ from each other and from zero, so that a field that is added later takes
// part in every test below. Secrets begin with SECRET.
func fill(v reflect.Value, path string, secret bool) {
	switch v.Type() {
	case reflect.TypeFor[json.RawMessage]():
		v.SetBytes([]byte(fmt.Sprintf(`{"raw":%q}`, path)))
		return
	case reflect.TypeFor[time.Duration]():
		v.SetInt(int64(1500 * time.Millisecond))
		return
	case reflect.TypeFor[time.Time]():
		v.Set(reflect.ValueOf(time.Date(2025, 1, 2, 3, 4, 5, 0, time.UTC)))
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(path)
		if secret {
			v.SetString("SECRET " + path)
		}
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(int64(len(path)))
	case reflect.Float64:
		v.SetFloat(float64(len(path)) + 0.5)
	case reflect.Interface:
		if v.NumMethod() == 0 {
			v.Set(reflect.ValueOf(path))
		}
	case reflect.Func:
		v.Set(reflect.MakeFunc(v.Type(), func([]reflect.Value) (out []reflect.Value) {
			for i := range v.Type().NumOut() {
				out = append(out, reflect.Zero(v.Type().Out(i)))
			}
			return out
		}))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), path, secret)
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			v.SetBytes([]byte(path))
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0), path, secret)
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		elem := reflect.New(v.Type().Elem()).Elem()
		fill(elem, path, secret)
		v.SetMapIndex(reflect.ValueOf("k"), elem)
	case reflect.Struct:
		for i := range v.NumField() {
			f := v.Type().Field(i)
			if !f.IsExported() {
				continue // of a foreign type
			}
			fill(v.Field(i), strings.TrimPrefix(path+"."+f.Name, "."), secret || hasOption(f, "secret"))
		}
	}
	switch p := v.Addr().Interface().(type) { // what has to be valid
	case *SystemMessage:
		p.Mode, p.Sections = "customize", map[string]SystemSection{"tone": {Action: "replace", Content: path + ".Sections.Content"}}
	case *MCPServerConfig:
		p.Type, p.URL = "stdio", ""
	case *map[string]MCPServerConfig:
		s := (*p)["k"]
		s.Type, s.Command, s.URL = "http", "", path+".URL"
		(*p)["remote"] = s
	case *Tool:
		p.Name, p.Defer, p.Parameters = "tool_1", "auto", json.RawMessage(`{"type":"object","properties":{"q":{"type":"string"}}}`)
	}
}

// hasOption reports whether f's json tag has opt behind its name.
func hasOption(f reflect.StructField, opt string) bool {
	return slices.Contains(strings.Split(f.Tag.Get("json"), ",")[1:], opt)
}

func wireName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	return name
}

const testID = "11111111-2222-4333-8444-555555555555"

// fullConfig returns a configuration with every field set that kind takes. Of fields that exclude each other it has Provider,
// or with named the others.
func fullConfig(t *testing.T, kind startKind, named bool) *SessionConfig {
	t.Helper()
	var c SessionConfig
	v := reflect.ValueOf(&c).Elem()
	fill(v, "", false)
	foreign := []string{"resume", "create"}[kind]
	for i := range v.NumField() {
		if hasOption(v.Type().Field(i), foreign) {
			v.Field(i).SetZero()
		}
	}
	c.SessionID = testID
	c.EventBuffer = 7
	c.WorkingDirectory = filepath.Join(t.TempDir(), "work")
	if named {
		c.Provider, c.GitHubToken = nil, ""
	} else {
		c.Providers, c.Models, c.GitHubTokenProviderRegistrationID = nil, nil, ""
	}
	return &c
}

func mustEncode(t *testing.T, c *SessionConfig, kind startKind, o *Options) map[string]json.RawMessage {
	t.Helper()
	e, err := c.encode(kind, testID, o)
	if err != nil {
		t.Fatal(err)
	}
	return members(t, e.params)
}

func members(t *testing.T, raw json.RawMessage) map[string]json.RawMessage {
	t.Helper()
	var m map[string]json.RawMessage
	if err := json.Unmarshal(raw, &m); err != nil {
		t.Fatalf("%v in %s", err, raw)
	}
	return m
}

// golden compares raw, indented, with a file; UPDATE_GOLDEN=1 writes the file.
func golden(t *testing.T, file string, raw []byte) {
	t.Helper()
	var got bytes.Buffer
	if err := json.Indent(&got, raw, "", "\t"); err != nil {
		t.Fatalf("%v in %s", err, raw)
	}
	got.WriteByte('\n')
	path := filepath.Join("testdata", file)
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(path, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	g, w := strings.Split(got.String(), "\n"), strings.Split(strings.ReplaceAll(string(want), "\r\n", "\n"), "\n")
	for i := range min(len(g), len(w)) {
		if g[i] != w[i] {
			t.Fatalf("%s:%d: got %s, want %s", file, i+1, g[i], w[i])
		}
	}
	if len(g) != len(w) {
		t.Fatalf("%s: got %d lines, want %d", file, len(g), len(w))
	}
}

// TestSessionConfigGolden pins what a configuration with every field set looks like on the wire.
func TestSessionConfigGolden(t *testing.T) {
	seen := make(map[string]bool)
	for _, tc := range []struct {
		file  string
		kind  startKind
		named bool
	}{
		{"config_create.json", startCreate, false},
		{"config_resume.json", startResume, false},
		{"config_named.json", startResume, true},
	} {
		t.Run(tc.file, func(t *testing.T) {
			c := fullConfig(t, tc.kind, tc.named)
			e, err := c.encode(tc.kind, testID, &Options{OnGitHubTelemetry: func(GitHubTelemetry) {}})
			if err != nil {
				t.Fatal(err)
			}
			dir, _ := json.Marshal(c.WorkingDirectory)
			golden(t, tc.file, bytes.Replace(e.params, dir, []byte(`"WorkingDirectory"`), 1))
			for name := range members(t, e.params) {
				seen[name] = true
			}
		})
	}

	// The protocol's members, written down apart from the struct. The trace context is added by the caller of encode.
	want := strings.Fields(`sessionId model clientName reasoningEffort reasoningSummary verbosity contextTier streaming systemMessage tools
		toolSearch availableTools excludedTools toolFilterPrecedence excludedBuiltinAgents canvases openCanvases requestCanvasRenderer
		requestExtensions extensionSdkPath extensionInfo canvasProvider commands mcpServers mcpOAuthTokenStorage authClientIdMetadataUrl
		diagnostics disabledMcpServers githubMcpToolConfig envValueMode embeddingCacheStorage skipEmbeddingRetrieval enableConfigDiscovery
		organizationCustomInstructions enableOnDemandInstructionDiscovery refreshCustomInstructions enableFileHooks enableHostGitOperations
		enableSessionStore enableSkills skillDirectories instructionDirectories pluginDirectories disabledSkills customAgents
		customAgentsLocalOnly defaultAgent agent infiniteSessions largeOutput memory provider providers models capi modelCapabilities
		enableSessionTelemetry enableCitations enableFileChangeTracking sessionLimits workingDirectory additionalDirectories configDir
		gitHubToken gitHubTokenProviderRegistrationId remoteSession cloud includeSubAgentStreamingEvents enableGitHubTelemetryForwarding
		requestPermission requestUserInput requestElicitation requestExitPlanMode requestAutoModeSwitch requestMcpApps hooks askUserVariant
		isExperimentalMode featureFlags expAssignments enableManagedSettings managedSettings disableResume continuePendingWork workflows
		requestedEnvironmentVariables skipCustomInstructions coauthorEnabled manageScheduleEnabled name sandboxConfig
		k`) // k is what fill puts into Extra
	for _, name := range want {
		if !seen[name] {
			t.Errorf("%s is never sent", name)
		}
		delete(seen, name)
	}
	if len(seen) > 0 {
		t.Errorf("sent, but not in the list: %v", seen)
	}
	var local []string
	for _, f := range reflect.VisibleFields(reflect.TypeFor[SessionConfig]()) {
		if wireName(f) == "-" {
			local = append(local, f.Name)
		}
	}
	if got, want := strings.Join(local, " "), "SessionID EventBuffer Transforms GitHubTokenProvider SessionFS OnMCPAuth OnSampling Hooks OnHook Handlers Extra"; got != want {
		t.Errorf("fields that are not sent as such: %s, want %s", got, want)
	}
}

// TestSessionConfigDefaults pins what is sent when nothing is configured, in both modes.
func TestSessionConfigDefaults(t *testing.T) {
	const flags = `"requestPermission":false,"requestUserInput":false,"requestElicitation":false,"requestExitPlanMode":false,"requestAutoModeSwitch":false`
	for _, tc := range []struct {
		name           string
		cfg            *SessionConfig
		mode           ClientMode
		params, update string
	}{
		{name: "nil",
			params: `{"sessionId":"s","envValueMode":"direct","toolFilterPrecedence":"excluded","hooks":false,"streaming":false,"includeSubAgentStreamingEvents":true,` + flags + `}`},
		{name: "own options in cli mode", cfg: &SessionConfig{CoauthorEnabled: or[bool](nil, false)},
			params: `{"sessionId":"s","envValueMode":"direct","toolFilterPrecedence":"excluded","hooks":false,"streaming":false,"includeSubAgentStreamingEvents":true,"coauthorEnabled":false,` + flags + `}`,
			update: `{"coauthorEnabled":false}`},
		{name: "empty", cfg: &SessionConfig{AvailableTools: []string{}}, mode: ModeEmpty,
			params: `{"sessionId":"s","envValueMode":"direct","toolFilterPrecedence":"excluded","hooks":false,"streaming":false,"includeSubAgentStreamingEvents":true,` +
				`"systemMessage":{"mode":"customize","sections":{"environment_context":{"action":"remove"}}},"enableOnDemandInstructionDiscovery":false,` +
				`"availableTools":[],"mcpOAuthTokenStorage":"in-memory","customAgentsLocalOnly":true,"enableSkills":false,"enableFileHooks":false,` +
				`"enableHostGitOperations":false,"memory":{"enabled":false},"enableSessionStore":false,"embeddingCacheStorage":"in-memory",` +
				`"skipEmbeddingRetrieval":true,"enableSessionTelemetry":false,"isExperimentalMode":false,` + flags + `}`,
			update: `{"skipCustomInstructions":true,"customAgentsLocalOnly":true,"coauthorEnabled":false,"manageScheduleEnabled":false,"installedPlugins":[],"includedBuiltinSkills":[]}`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e, err := tc.cfg.encode(startCreate, "s", &Options{Mode: tc.mode})
			if err != nil {
				t.Fatal(err)
			}
			if string(e.params) != tc.params {
				t.Errorf("got  %s\nwant %s", e.params, tc.params)
			}
			if string(e.update) != tc.update {
				t.Errorf("update: got %s, want %s", e.update, tc.update)
			}
		})
	}
	if _, err := (&SessionConfig{}).encode(startCreate, "s", &Options{Mode: ModeEmpty}); !errors.Is(err, ErrInvalidConfig) {
		t.Errorf("empty mode without AvailableTools: %v", err)
	}
}

// TestEmptyModeKeepsCallersValues sets everything and finds it unchanged in empty mode.
func TestEmptyModeKeepsCallersValues(t *testing.T) {
	cli := mustEncode(t, fullConfig(t, startResume, false), startResume, nil)
	full := fullConfig(t, startResume, false)
	full.SkipCustomInstructions, full.CoauthorEnabled = new(bool), or[bool](nil, true)
	full.ManageScheduleEnabled, full.CustomAgentsLocalOnly = or[bool](nil, true), new(bool)
	e, err := full.encode(startResume, testID, &Options{Mode: ModeEmpty})
	if err != nil {
		t.Fatal(err)
	}
	for name, got := range members(t, e.params) {
		switch name {
		case "systemMessage", "workingDirectory", "skipCustomInstructions", "coauthorEnabled", "customAgentsLocalOnly", "manageScheduleEnabled":
		default:
			if string(got) != string(cli[name]) {
				t.Errorf("%s: got %s, want %s", name, got, cli[name])
			}
		}
	}
	const want = `{"skipCustomInstructions":false,"customAgentsLocalOnly":false,"coauthorEnabled":true,"manageScheduleEnabled":true,"installedPlugins":[],"includedBuiltinSkills":[]}`
	if string(e.update) != want {
		t.Errorf("update: got %s, want %s", e.update, want)
	}
}

// TestCase003CreateAndResumeAlike compares the requests of one configuration.
func TestCase003CreateAndResumeAlike(t *testing.T) {
	for _, named := range []bool{false, true} {
		c := fullConfig(t, startCreate, named)
		create := mustEncode(t, c, startCreate, nil)
		v := reflect.ValueOf(c).Elem()
		for _, f := range reflect.VisibleFields(v.Type()) {
			if hasOption(f, "create") {
				if create[wireName(f)] == nil {
					t.Errorf("%s is not in create", f.Name)
				}
				delete(create, wireName(f))
				v.FieldByIndex(f.Index).SetZero()
			}
		}
		resume := mustEncode(t, c, startResume, nil)
		for name := range resume {
			if string(resume[name]) != string(create[name]) {
				t.Errorf("%s: create %s, resume %s", name, create[name], resume[name])
			}
		}
		if len(create) != len(resume) {
			t.Errorf("create has %d members, resume %d", len(create), len(resume))
		}
	}
}

// TestOneSidedFields sets each field that one of the requests lacks, alone.
func TestOneSidedFields(t *testing.T) {
	n := 0
	for _, f := range reflect.VisibleFields(reflect.TypeFor[SessionConfig]()) {
		for own, option := range []string{"create", "resume"} {
			if !hasOption(f, option) {
				continue
			}
			n++
			var c SessionConfig
			fill(reflect.ValueOf(&c).Elem().FieldByIndex(f.Index), f.Name, false)
			if _, err := c.encode(startKind(own), testID, nil); err != nil {
				t.Errorf("%s on %s: %v", f.Name, option, err)
			}
			_, err := c.encode(startKind(1-own), testID, nil)
			if !errors.Is(err, ErrInvalidConfig) || !strings.Contains(err.Error(), "SessionConfig."+f.Name+":") {
				t.Errorf("%s not on %s: %v", f.Name, option, err)
			}
		}
	}
	if n != 9 {
		t.Errorf("%d one-sided fields, want 9", n)
	}
}

// structs calls f for t and every struct type of this package below it, once.
func structs(t reflect.Type, seen map[reflect.Type]bool, f func(reflect.Type)) {
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Map:
		structs(t.Elem(), seen, f)
	case reflect.Struct:
		if seen[t] || t.PkgPath() != reflect.TypeFor[SessionConfig]().PkgPath() {
			return
		}
		seen[t] = true
		f(t)
		for i := range t.NumField() {
			if wireName(t.Field(i)) != "-" {
				structs(t.Field(i).Type, seen, f)
			}
		}
	}
}

// TestCase082ThreeStates sets each optional field of every configuration type to unset, zero and a value, among others that are set.
func TestCase082ThreeStates(t *testing.T) {
	n := 0
	check := func(typ reflect.Type) {
		for _, f := range reflect.VisibleFields(typ) {
			if !hasOption(f, "omitempty") {
				continue
			}
			n++
			encode := func(set func(reflect.Value)) (json.RawMessage, bool) {
				v := reflect.New(typ)
				fill(v.Elem(), typ.Name(), false)
				set(v.Elem().FieldByIndex(f.Index))
				raw, err := encodeWire(v.Interface())
				if err != nil {
					t.Fatalf("%v.%s: %v", typ, f.Name, err)
				}
				got, ok := members(t, raw)[wireName(f)]
				return got, ok
			}
			if got, ok := encode(reflect.Value.SetZero); ok {
				t.Errorf("%v.%s unset: sent as %s", typ, f.Name, got)
			}
			if got, ok := encode(func(v reflect.Value) {
				if v.IsZero() { // fill leaves MCPServerConfig.URL to servers of the other type
					v.SetString("http://x")
				}
			}); !ok || string(got) == "null" {
				t.Errorf("%v.%s set: %s", typ, f.Name, got)
			}
			var want string
			switch k := f.Type.Kind(); {
			case f.Type == reflect.TypeFor[json.RawMessage]():
				continue
			case k == reflect.Slice:
				want = "[]"
			case k == reflect.Map:
				want = "{}"
			case k == reflect.Pointer && f.Type.Elem().Kind() == reflect.Bool:
				want = "false"
			case k == reflect.Pointer && f.Type.Elem().Kind() != reflect.Struct:
				want = "0"
			default:
				continue // a zero that means nothing else than unset, or a struct whose own fields are checked
			}
			got, ok := encode(func(v reflect.Value) {
				switch v.Kind() {
				case reflect.Slice:
					v.Set(reflect.MakeSlice(f.Type, 0, 0))
				case reflect.Map:
					v.Set(reflect.MakeMap(f.Type))
				default:
					v.Set(reflect.New(f.Type.Elem()))
				}
			})
			if !ok || string(got) != want {
				t.Errorf("%v.%s zero: got %s, want %s", typ, f.Name, got, want)
			}
		}
	}
	structs(reflect.TypeFor[SessionConfig](), map[reflect.Type]bool{}, check)
	if n < 150 {
		t.Errorf("only %d fields looked at", n)
	}

	// Through the whole of encode, which copies lists and maps.
	got := mustEncode(t, &SessionConfig{
		Tools: []Tool{}, MCPServers: map[string]MCPServerConfig{}, CustomAgents: []CustomAgent{{Name: "a", Prompt: "p", Tools: []string{}}},
		IncludeSubAgentStreamingEvents: new(bool),
	}, startCreate, nil)
	for name, want := range map[string]string{
		"tools": "[]", "mcpServers": "{}", "customAgents": `[{"name":"a","prompt":"p","tools":[]}]`, "includeSubAgentStreamingEvents": "false",
		"streaming": "false",
	} {
		if string(got[name]) != want {
			t.Errorf("%s: got %s, want %s", name, got[name], want)
		}
	}
}

// scramble overwrites all that can be reached from v by reference.
func scramble(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		if !v.IsNil() {
			scramble(v.Elem())
		}
	case reflect.Struct:
		for i := range v.NumField() {
			scramble(v.Field(i))
		}
	case reflect.Slice:
		for i := range v.Len() {
			scramble(v.Index(i))
			v.Index(i).SetZero()
		}
	case reflect.Map:
		for _, k := range v.MapKeys() {
			scramble(v.MapIndex(k))
		}
		v.Clear()
	}
	if v.CanSet() {
		v.SetZero()
	}
}

// TestCase090CallersDataIsCopied changes everything after encode, and finds that encode changed nothing.
func TestCase090CallersDataIsCopied(t *testing.T) {
	for _, o := range []*Options{nil, {Mode: ModeEmpty}} {
		c := fullConfig(t, startResume, false)
		c.Tools = append(c.Tools, Tool{Name: "bare"})
		c.MCPServers["untyped"] = MCPServerConfig{Command: "c"}
		c.SystemMessage.Mode = ""
		before, err := encodeWire(c)
		if err != nil {
			t.Fatal(err)
		}
		e, err := c.encode(startResume, testID, o)
		if err != nil {
			t.Fatal(err)
		}
		params, update := string(e.params), string(e.update)
		if after, _ := encodeWire(c); !bytes.Equal(after, before) {
			t.Errorf("the caller's configuration was changed:\n%s\n%s", before, after)
		}
		scramble(reflect.ValueOf(c))
		if string(e.params) != params || string(e.update) != update {
			t.Errorf("what was encoded changed with the caller's data")
		}
		if !reflect.ValueOf(*c).IsZero() {
			t.Fatal("scramble left something")
		}
	}

	m := &Message{Attachments: []Attachment{{Type: "file", Path: "a"}}, RequestHeaders: map[string]string{"h": "v"}, ResponseFormat: &ResponseFormat{Schema: json.RawMessage(`{}`)}}
	raw, err := m.encode("s")
	if err != nil {
		t.Fatal(err)
	}
	if m.Attachments[0].DisplayName != "" || m.ResponseFormat.Name != "" || m.ResponseFormat.Strict != nil {
		t.Errorf("the caller's message was changed: %v", m)
	}
	was := string(raw)
	scramble(reflect.ValueOf(m))
	if string(raw) != was {
		t.Error("the encoded message changed with the caller's data")
	}
}

func TestSessionConfigInvalid(t *testing.T) {
	tool := func(t Tool) SessionConfig { return SessionConfig{Tools: []Tool{t}} }
	server := func(s MCPServerConfig) SessionConfig {
		return SessionConfig{MCPServers: map[string]MCPServerConfig{"srv": s}}
	}
	transform := func(context.Context, string) (string, error) { return "", nil }
	command := func(context.Context, CommandCall) error { return nil }
	long := strings.Repeat("é", 400)
	for _, tc := range []struct {
		field string // of the error
		cfg   SessionConfig
		id    string // "" is testID
		kind  startKind
	}{
		{field: "SessionID", id: "a.b"},
		{field: "SessionID", id: "a b"},
		{field: "SessionID", id: "../x"},
		{field: "SessionID", id: strings.Repeat("a", 251)},
		{field: "SessionID", cfg: SessionConfig{SessionID: "other"}, kind: startResume},
		{field: "EventBuffer", cfg: SessionConfig{EventBuffer: -1}},
		{field: "Provider", cfg: SessionConfig{Provider: &ProviderConfig{BaseURL: "u"}, Providers: []NamedProviderConfig{{Name: "n", BaseURL: "u"}}}},
		{field: "Provider", cfg: SessionConfig{Provider: &ProviderConfig{BaseURL: "u"}, Models: []ProviderModelConfig{{ID: "i", Provider: "p"}}}},
		{field: "Provider.BaseURL", cfg: SessionConfig{Provider: &ProviderConfig{APIKey: "SECRET"}}},
		{field: "Providers[0].Name", cfg: SessionConfig{Providers: []NamedProviderConfig{{BaseURL: "u", APIKey: "SECRET"}}}},
		{field: "Providers[0].Name", cfg: SessionConfig{Providers: []NamedProviderConfig{{Name: "a/b", BaseURL: "u"}}}},
		{field: "Providers[1].Name", cfg: SessionConfig{Providers: []NamedProviderConfig{{Name: "a", BaseURL: "u"}, {Name: "a", BaseURL: "u"}}}},
		{field: "Providers[0].BaseURL", cfg: SessionConfig{Providers: []NamedProviderConfig{{Name: "a", BearerToken: "SECRET"}}}},
		{field: "Models[0].Provider", cfg: SessionConfig{Models: []ProviderModelConfig{{ID: "i"}}}},
		{field: "GitHubToken", cfg: SessionConfig{GitHubToken: "SECRET", GitHubTokenProviderRegistrationID: "u"}},
		{field: "CanvasProvider.ID", cfg: SessionConfig{CanvasProvider: &CanvasProvider{ID: "connection:1"}}},
		{field: "CanvasProvider.ID", cfg: SessionConfig{CanvasProvider: &CanvasProvider{}}},
		{field: "AvailableTools[1]", cfg: SessionConfig{AvailableTools: []string{"builtin:*", "*"}}},
		{field: "ExcludedTools[0]", cfg: SessionConfig{ExcludedTools: []string{"*"}}},
		{field: "ExcludedTools[0]", cfg: SessionConfig{ExcludedTools: []string{""}}},
		{field: "AvailableTools[0]", cfg: SessionConfig{AvailableTools: []string{"mcp:"}}},
		{field: "Tools[0].Name", cfg: tool(Tool{})},
		{field: "Tools[0].Name", cfg: tool(Tool{Name: "a.b"})},
		{field: "Tools[0].Name", cfg: tool(Tool{Name: long})},
		{field: "Tools[0].Defer", cfg: tool(Tool{Name: "a", Defer: "always"})},
		{field: "Tools[0].Parameters", cfg: tool(Tool{Name: "a", Parameters: []string{"x"}})},
		{field: "Tools[0].Parameters", cfg: tool(Tool{Name: "a", Parameters: "{}"})},
		{field: "Tools[0].Parameters", cfg: tool(Tool{Name: "a", Parameters: json.RawMessage(`{"type":`)})},
		{field: "Tools[0].Parameters", cfg: tool(Tool{Name: "a", Parameters: make(chan int)})},
		{field: `Tools[0].Metadata["m"]`, cfg: tool(Tool{Name: "a", Metadata: map[string]any{"m": math.NaN()}})},
		{field: "Commands[0].Name", cfg: SessionConfig{Commands: []Command{{Handler: command}}}},
		{field: "Commands[0].Name", cfg: SessionConfig{Commands: []Command{{Name: "/a", Handler: command}}}},
		{field: "Commands[0].Name", cfg: SessionConfig{Commands: []Command{{Name: "a b", Handler: command}}}},
		{field: "Commands[0].Handler", cfg: SessionConfig{Commands: []Command{{Name: "a"}}}},
		{field: "Commands[1].Name", cfg: SessionConfig{Commands: []Command{{Name: "a", Handler: command}, {Name: "a", Handler: command}}}},
		{field: "Handlers", cfg: SessionConfig{Handlers: map[string]HandlerFunc{"m": nil}}},
		{field: `MCPServers["srv"].Command`, cfg: server(MCPServerConfig{Env: map[string]string{"K": "SECRET"}})},
		{field: `MCPServers["srv"].Command`, cfg: server(MCPServerConfig{Type: "http", URL: "u", Command: "c"})},
		{field: `MCPServers["srv"].URL`, cfg: server(MCPServerConfig{Type: "sse", Headers: map[string]string{"K": "SECRET"}})},
		{field: `MCPServers["srv"].URL`, cfg: server(MCPServerConfig{Command: "c", URL: "u"})},
		{field: `MCPServers["srv"].Timeout`, cfg: server(MCPServerConfig{Command: "c", Timeout: -1})},
		{field: `MCPServers["srv"].Extra["command"]`, cfg: server(MCPServerConfig{Command: "c", Extra: map[string]json.RawMessage{"command": json.RawMessage(`1`)}})},
		{field: `MCPServers[""]`, cfg: SessionConfig{MCPServers: map[string]MCPServerConfig{"": {Command: "c"}}}},
		{field: `CustomAgents[0].MCPServers["x"].Command`, cfg: SessionConfig{CustomAgents: []CustomAgent{{Name: "n", Prompt: "p", MCPServers: map[string]MCPServerConfig{"x": {}}}}}},
		{field: "CustomAgents[0].Prompt", cfg: SessionConfig{CustomAgents: []CustomAgent{{Name: "n"}}}},
		{field: "Cloud.Repository.Owner", cfg: SessionConfig{Cloud: &CloudOptions{Repository: &CloudRepository{Name: "n"}}}},
		{field: "SystemMessage.Mode", cfg: SessionConfig{SystemMessage: &SystemMessage{Mode: "prepend"}}},
		{field: "SystemMessage.Sections", cfg: SessionConfig{SystemMessage: &SystemMessage{Mode: "append", Sections: map[string]SystemSection{"tone": {Action: "remove"}}}}},
		{field: `SystemMessage.Sections["tone"].Action`, cfg: SessionConfig{SystemMessage: &SystemMessage{Sections: map[string]SystemSection{"tone": {Action: "delete"}}}}},
		{field: "Transforms", cfg: SessionConfig{Transforms: map[string]func(context.Context, string) (string, error){"tone": nil}}},
		{field: "Transforms", cfg: SessionConfig{Transforms: map[string]func(context.Context, string) (string, error){"": transform}}},
		{field: "Transforms", cfg: SessionConfig{SystemMessage: &SystemMessage{Mode: "replace"}, Transforms: map[string]func(context.Context, string) (string, error){"tone": transform}}},
		{field: "SandboxConfig", cfg: SessionConfig{SandboxConfig: json.RawMessage("{")}},
		{field: `Extra["streaming"]`, cfg: SessionConfig{Extra: map[string]json.RawMessage{"streaming": json.RawMessage("true")}}},
		{field: `Extra["envValueMode"]`, cfg: SessionConfig{Extra: map[string]json.RawMessage{"envValueMode": json.RawMessage("true")}}},
		{field: `Extra["new"]`, cfg: SessionConfig{Extra: map[string]json.RawMessage{"new": json.RawMessage("{")}}},
	} {
		t.Run(tc.field, func(t *testing.T) {
			id := tc.id
			if id == "" {
				id = testID
			}
			e, err := tc.cfg.encode(tc.kind, id, nil)
			if !errors.Is(err, ErrInvalidConfig) {
				t.Fatalf("got %v, %v", e, err)
			}
			text := err.Error()
			if !strings.Contains(text, "SessionConfig."+tc.field+":") {
				t.Errorf("%q does not name %s", text, tc.field)
			}
			if strings.Contains(text, "SECRET") || strings.Contains(text, id) || len(text) > 400 {
				t.Errorf("%q says too much", text)
			}
			if strings.Count(text, ErrInvalidConfig.Error()) != 1 {
				t.Errorf("%q repeats itself", text)
			}
		})
	}
	if _, err := (&SessionConfig{}).encode(startResume, "", nil); !errors.Is(err, ErrInvalidConfig) {
		t.Errorf("resume without an id: %v", err)
	}
	e, err := (&SessionConfig{Cloud: &CloudOptions{}}).encode(startCreate, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	if m := members(t, e.params); m["sessionId"] != nil || string(m["cloud"]) != "{}" {
		t.Errorf("cloud without an id: %s", e.params)
	}
	for _, id := range []string{"a", strings.Repeat("Z", 250), "a_b-9"} {
		if _, err := (&SessionConfig{SessionID: id}).encode(startResume, id, nil); err != nil {
			t.Errorf("id of %d bytes: %v", len(id), err)
		}
	}
}

// TestHandlersSetTheirFlag installs each handler alone.
func TestHandlersSetTheirFlag(t *testing.T) {
	flags := []string{"requestPermission", "requestUserInput", "requestElicitation", "requestExitPlanMode", "requestAutoModeSwitch", "hooks"}
	for field, flag := range map[string]string{
		"OnPermission": "requestPermission", "OnUserInput": "requestUserInput", "OnElicitation": "requestElicitation",
		"OnExitPlanMode": "requestExitPlanMode", "OnAutoModeSwitch": "requestAutoModeSwitch", "OnHook": "hooks", "Hooks": "hooks", "OnMCPAuth": "",
	} {
		var c SessionConfig
		fill(reflect.ValueOf(&c).Elem().FieldByName(field), "", false)
		for _, kind := range []startKind{startCreate, startResume} {
			got := mustEncode(t, &c, kind, nil)
			for _, f := range flags {
				if want := fmt.Sprint(f == flag); string(got[f]) != want {
					t.Errorf("%s: %s is %s, want %s", field, f, got[f], want)
				}
			}
		}
	}
	if got := mustEncode(t, &SessionConfig{Hooks: &Hooks{}}, startCreate, nil); string(got["hooks"]) != "false" {
		t.Errorf("hooks without a function: %s", got["hooks"])
	}
}

func TestCase073ToolSchemas(t *testing.T) {
	type schema struct {
		Type       string         `json:"type"`
		Properties map[string]any `json:"properties"`
		Required   []string       `json:"required"`
	}
	const none = `{"type":"object","properties":{}}`
	for _, tc := range []struct {
		name       string
		parameters any
		want       string
	}{
		{"nil", nil, none},
		{"nil raw", json.RawMessage(nil), none},
		{"null", json.RawMessage(" null "), none},
		{"nil map", map[string]any(nil), none},
		{"nil pointer", (*schema)(nil), none},
		{"empty object", json.RawMessage("{}"), none},
		{"struct with nil lists", schema{Type: "object"}, none},
		{"pointer", &schema{Type: "object", Required: []string{"a"}}, `{"type":"object","required":["a"],"properties":{}}`},
		{"order and digits kept", json.RawMessage(`{"properties": {"z": {"maximum": 12345678901234567890}, "a": {}}, "type": "object"}`),
			`{"properties":{"z":{"maximum":12345678901234567890},"a":{}},"type":"object"}`},
		{"nested required", json.RawMessage(`{"type":"object","properties":{"a":{"type":"object","required":null},"b":{"anyOf":[{"required":null},{"default":null}]}}}`),
			`{"type":"object","properties":{"a":{"type":"object"},"b":{"anyOf":[{},{"default":null}]}}}`},
		{"no type", map[string]any{"properties": map[string]any{"<a>": true}}, `{"type":"object","properties":{"<a>":true}}`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := mustEncode(t, &SessionConfig{Tools: []Tool{{Name: "t", Parameters: tc.parameters}}}, startCreate, nil)
			if want := `[{"name":"t","parameters":` + tc.want + `}]`; string(got["tools"]) != want {
				t.Errorf("got %s, want %s", got["tools"], want)
			}
		})
	}
}

func TestCase074ToolNames(t *testing.T) {
	_, err := (&SessionConfig{Tools: []Tool{{Name: "view"}, {Name: "edit"}, {Name: "view"}}}).encode(startCreate, testID, nil)
	if !errors.Is(err, ErrInvalidConfig) || !strings.Contains(err.Error(), `Tools[2].Name: "view"`) {
		t.Errorf("two of a name: %v", err)
	}
	got := mustEncode(t, &SessionConfig{Tools: []Tool{{Name: "view", OverridesBuiltIn: true}, {Name: "edit"}}}, startCreate, nil)
	const want = `[{"name":"view","parameters":{"type":"object","properties":{}},"overridesBuiltInTool":true},{"name":"edit","parameters":{"type":"object","properties":{}}}]`
	if string(got["tools"]) != want {
		t.Errorf("got %s, want %s", got["tools"], want)
	}
}

func TestSystemMessage(t *testing.T) {
	transform := func(context.Context, string) (string, error) { return "", nil }
	transforms := func(ids ...string) map[string]func(context.Context, string) (string, error) {
		m := make(map[string]func(context.Context, string) (string, error))
		for _, id := range ids {
			m[id] = transform
		}
		return m
	}
	for _, tc := range []struct {
		name string
		cfg  SessionConfig
		mode ClientMode
		want string
	}{
		{name: "none"},
		{name: "unset mode", cfg: SessionConfig{SystemMessage: &SystemMessage{Content: "a<b"}}, want: `{"content":"a<b"}`},
		{name: "sections alone", cfg: SessionConfig{SystemMessage: &SystemMessage{Sections: map[string]SystemSection{"tone": {Action: "remove"}}}},
			want: `{"mode":"customize","sections":{"tone":{"action":"remove"}}}`},
		{name: "transform alone", cfg: SessionConfig{Transforms: transforms("tone")}, want: `{"mode":"customize","sections":{"tone":{"action":"transform"}}}`},
		{name: "transform promotes append", cfg: SessionConfig{SystemMessage: &SystemMessage{Mode: "append", Content: "c"}, Transforms: transforms("tone")},
			want: `{"mode":"customize","content":"c","sections":{"tone":{"action":"transform"}}}`},
		{name: "the caller's section stays", cfg: SessionConfig{Transforms: transforms("tone", "safety"),
			SystemMessage: &SystemMessage{Mode: "customize", Sections: map[string]SystemSection{"tone": {Action: "replace", Content: "x"}}}},
			want: `{"mode":"customize","sections":{"safety":{"action":"transform"},"tone":{"action":"replace","content":"x"}}}`},
		{name: "empty mode promotes", mode: ModeEmpty, cfg: SessionConfig{SystemMessage: &SystemMessage{Mode: "append", Content: "c"}},
			want: `{"mode":"customize","content":"c","sections":{"environment_context":{"action":"remove"}}}`},
		{name: "empty mode leaves replace", mode: ModeEmpty, cfg: SessionConfig{SystemMessage: &SystemMessage{Mode: "replace", Content: "c"}},
			want: `{"mode":"replace","content":"c"}`},
		{name: "empty mode leaves the section", mode: ModeEmpty, cfg: SessionConfig{
			SystemMessage: &SystemMessage{Mode: "customize", Sections: map[string]SystemSection{"environment_context": {Action: "preserve"}}}},
			want: `{"mode":"customize","sections":{"environment_context":{"action":"preserve"}}}`},
		{name: "empty mode leaves the transform", mode: ModeEmpty, cfg: SessionConfig{Transforms: transforms("environment_context")},
			want: `{"mode":"customize","sections":{"environment_context":{"action":"transform"}}}`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.cfg.AvailableTools = []string{}
			got := mustEncode(t, &tc.cfg, startCreate, &Options{Mode: tc.mode})
			if string(got["systemMessage"]) != tc.want {
				t.Errorf("got %s, want %s", got["systemMessage"], tc.want)
			}
		})
	}
}

// TestSmallRules covers single decisions of the encoding.
func TestSmallRules(t *testing.T) {
	wd, err := filepath.Abs("sub")
	if err != nil {
		t.Fatal(err)
	}
	wdJSON, _ := json.Marshal(wd)
	got := mustEncode(t, &SessionConfig{
		WorkingDirectory: "sub",
		Commands:         []Command{{Name: "deploy", Handler: func(context.Context, CommandCall) error { return nil }}},
		MCPServers: map[string]MCPServerConfig{
			"b": {URL: "https://x/?a=1&b=2", Timeout: time.Nanosecond, Extra: map[string]json.RawMessage{"oauthClientId": json.RawMessage(`"id"`)}},
			"a": {Command: "c", Timeout: math.MaxInt64},
			"c": {Type: "later"},
		},
		Provider: &ProviderConfig{BaseURL: "u", BearerTokenProvider: func(context.Context, string) (string, error) { return "", nil }},
		Extra:    map[string]json.RawMessage{"future": json.RawMessage(`{"a": [1]}`)},
	}, startCreate, nil)
	for name, want := range map[string]string{
		"workingDirectory": string(wdJSON),
		"commands":         `[{"name":"deploy","description":""}]`,
		"mcpServers":       `{"a":{"type":"stdio","timeout":9223372036855,"command":"c"},"b":{"type":"http","timeout":1,"url":"https://x/?a=1&b=2","oauthClientId":"id"},"c":{"type":"later"}}`,
		"provider":         `{"baseUrl":"u","hasBearerTokenProvider":true}`,
		"future":           `{"a":[1]}`,
	} {
		if string(got[name]) != want {
			t.Errorf("%s: got %s, want %s", name, got[name], want)
		}
	}
	for _, tool := range IsolatedTools() {
		if !regexp.MustCompile(`^builtin:[a-z_]+$`).MatchString(tool) {
			t.Error(tool)
		}
	}
}

// secretHolders are values of every type that holds secrets, filled.
func secretHolders(t *testing.T) []any {
	t.Helper()
	var list []any
	for _, p := range []any{&ProviderConfig{}, &NamedProviderConfig{}, &MCPServerConfig{}, &Message{}, &Options{}, &MCPAuthToken{}, &CustomAgent{}} {
		fill(reflect.ValueOf(p).Elem(), "", false)
		list = append(list, p)
	}
	return append(list, fullConfig(t, startResume, false), fullConfig(t, startCreate, true))
}

// TestCase089SecretsDoNotPrint prints everything that holds secrets in every way that programs print.
func TestCase089SecretsDoNotPrint(t *testing.T) {
	for _, p := range secretHolders(t) {
		typ := reflect.TypeOf(p).Elem()
		wire, err := encodeWire(p)
		if err != nil {
			t.Fatalf("%v: %v", typ, err)
		}
		if !bytes.Contains(wire, []byte("SECRET")) {
			t.Fatalf("%v: no secret reaches the wire: the test is blind", typ)
		}
		value := reflect.ValueOf(p).Elem().Interface()
		slice := reflect.Append(reflect.MakeSlice(reflect.SliceOf(typ), 0, 1), reflect.ValueOf(value)).Interface()
		for i, v := range []any{p, value, slice, map[string]any{"k": value}, []any{p}, struct{ X any }{value}, struct{ X any }{p}} {
			var texts []string
			for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "% X", "%d", "%t", "%10.3v"} {
				texts = append(texts, fmt.Sprintf(verb, v))
			}
			texts = append(texts, fmt.Sprint(v), fmt.Errorf("wrapped %v", v).Error())
			raw, err := json.Marshal(v)
			if err != nil {
				t.Errorf("%T: %v", v, err)
			}
			texts = append(texts, string(raw))
			var log bytes.Buffer
			for _, h := range []slog.Handler{slog.NewTextHandler(&log, nil), slog.NewJSONHandler(&log, nil)} {
				slog.New(h).Info("m", "v", v, slog.Group("g", slog.Any("v", v)))
			}
			texts = append(texts, log.String())
			for way, text := range texts {
				if strings.Contains(text, "SECRET") || strings.Contains(strings.ToLower(text), "534543524554") {
					t.Errorf("%T, way %d: %.300s", v, way, text)
				}
			}
			if i < 2 && !strings.Contains(texts[1], redacted) {
				t.Errorf("%T: %%+v does not say that there is a secret: %.300s", v, texts[1])
			}
		}

		// secrets lists exactly what is tagged.
		var want []string
		for _, s := range regexp.MustCompile(`"SECRET ([^"]*)"`).FindAllStringSubmatch(string(wire), -1) {
			want = append(want, "SECRET "+s[1])
		}
		slices.Sort(want)
		got := secretsOf(p)
		slices.Sort(got)
		if want = slices.Compact(want); !slices.Equal(got, want) {
			t.Errorf("%v: secrets are %q, want %q", typ, got, want)
		}

		// Tags follow names; methods follow tags, also of what is inside.
		structs(typ, map[reflect.Type]bool{}, func(outer reflect.Type) {
			for i := range outer.NumField() {
				f := outer.Field(i)
				holds := f.Type.Kind() == reflect.String || f.Type == reflect.TypeFor[map[string]string]() || f.Name == "Env"
				if holds && regexp.MustCompile(`(?i)token$|key$|secret|password|headers|^env$`).MatchString(f.Name) && !hasOption(f, "secret") {
					t.Errorf("%v.%s is not tagged as a secret", outer, f.Name)
				}
			}
			structs(outer, map[reflect.Type]bool{}, func(inner reflect.Type) {
				for _, f := range reflect.VisibleFields(inner) {
					_, format := reflect.Zero(outer).Interface().(fmt.Formatter)
					_, marshal := reflect.Zero(outer).Interface().(json.Marshaler)
					if hasOption(f, "secret") && (!format || !marshal) {
						t.Errorf("%v holds %v.%s and prints it", outer, inner, f.Name)
					}
				}
			})
		})
	}

	var nilConfig *SessionConfig
	if got := fmt.Sprintf("%v", nilConfig); got != "<nil>" {
		t.Errorf("nil prints as %s", got)
	}
	if got := fmt.Sprintf("%+v", ProviderConfig{BaseURL: "u", APIKey: "SECRET"}); got != `copilot.ProviderConfig{"baseUrl":"u","apiKey":"[redacted]"}` {
		t.Error(got)
	}
	if got := fmt.Sprintf("%v", SessionConfig{GitHubToken: "SECRET", Tools: []Tool{{Parameters: make(chan int)}}}); strings.Contains(got, "SECRET") {
		t.Error(got)
	}
}

func TestSecretsForMasking(t *testing.T) {
	c := &SessionConfig{
		GitHubToken: "gho_1234",
		Provider:    &ProviderConfig{APIKey: "1", Headers: map[string]string{"Authorization": "Bearer abcdefgh", "X": "gho_1234"}},
		MCPServers:  map[string]MCPServerConfig{"s": {Env: map[string]string{"A": "true-value", "B": "no"}}},
	}
	want := []string{"Bearer abcdefgh", "true-value", "abcdefgh", "gho_1234"} // no "1", no "no"
	if got := secretsOf(c); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	o := &Options{GitHubToken: "gho_1234", Env: []string{"PATH=/bin", "MY_API_KEY=xyzzy"}}
	if got, want := secretsOf(o), []string{"MY_API_KEY=xyzzy", "PATH=/bin", "gho_1234", "xyzzy"}; !slices.Equal(got, want) {
		t.Errorf("options: got %q, want %q", got, want)
	}
	if got := secretsOf((*SessionConfig)(nil)); len(got) != 0 {
		t.Errorf("nil has %q", got)
	}
}

func TestMessageGolden(t *testing.T) {
	var m Message
	fill(reflect.ValueOf(&m).Elem(), "", false)
	m.Mode, m.AgentMode = Enqueue, AgentModePlan
	m.Attachments = []Attachment{{Type: "file", Path: "/a/b.go"}}
	m.ResponseFormat.Schema = map[string]any{"type": "object"}
	raw, err := m.encode("the-session")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "message.json", raw)
	got := members(t, raw)
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Message]()) {
		if got[wireName(f)] == nil {
			t.Errorf("%s is not sent", f.Name)
		}
	}

	raw, err = (&Message{Prompt: "<&>\u2028", Attachments: []Attachment{}, RequestHeaders: map[string]string{}, Billable: new(bool)}).encode("s")
	if want := `{"sessionId":"s","prompt":"<&>\u2028","billable":false}`; err != nil || string(raw) != want {
		t.Errorf("got %s, %v, want %s", raw, err, want)
	}
	raw, err = (&Message{ResponseFormat: &ResponseFormat{Schema: json.RawMessage(`{}`)}}).encode("s")
	if want := `{"sessionId":"s","responseFormat":{"type":"json_schema","jsonSchema":{"name":"response","schema":{},"strict":true}},"prompt":""}`; err != nil || string(raw) != want {
		t.Errorf("got %s, %v, want %s", raw, err, want)
	}
}

func TestMessageInvalid(t *testing.T) {
	for _, tc := range []struct {
		field string
		m     Message
	}{
		{"Mode", Message{Mode: "later"}},
		{"AgentMode", Message{AgentMode: "yolo"}},
		{"ResponseFormat", Message{Mode: Immediate, ResponseFormat: &ResponseFormat{Schema: map[string]any{}}}},
		{"ResponseFormat.Schema", Message{ResponseFormat: &ResponseFormat{}}},
		{"ResponseFormat.Schema", Message{ResponseFormat: &ResponseFormat{Schema: 1}}},
		{"ResponseFormat.Schema", Message{ResponseFormat: &ResponseFormat{Schema: make(chan int)}}},
		{"Attachments[1]", Message{Attachments: []Attachment{{Type: "github_url", URL: "u"}, {Type: "video"}}}},
	} {
		raw, err := tc.m.encode("the-session")
		if !errors.Is(err, ErrInvalidConfig) || !strings.Contains(err.Error(), "Message."+tc.field+":") {
			t.Errorf("%s: got %s, %v", tc.field, raw, err)
		} else if strings.Contains(err.Error(), "the-session") {
			t.Errorf("%v shows the id", err)
		}
	}
}

func TestAttachments(t *testing.T) {
	const png = "iVBORw0KGgowMDAw" // the signature of PNG, and more
	at := time.Date(2025, 1, 2, 3, 4, 5, 0, time.UTC)
	repo := &GitHubRepo{Owner: "o", Name: "n"}
	for _, tc := range []struct {
		a    Attachment
		want string // "" is an error
	}{
		{Attachment{Type: "file", Path: "/a/b.go"}, `{"type":"file","path":"/a/b.go","displayName":"b.go"}`},
		{Attachment{Type: "file", Path: `C:\a\b.go`}, `{"type":"file","path":"C:\\a\\b.go","displayName":"b.go"}`},
		{Attachment{Type: "file", Path: "b", DisplayName: "mine", LineRange: &LineRange{Start: 1, End: 2}},
			`{"type":"file","path":"b","displayName":"mine","lineRange":{"start":1,"end":2}}`},
		{Attachment{Type: "directory", Path: "/a/dir/"}, `{"type":"directory","path":"/a/dir/","displayName":"dir"}`},
		{Attachment{Type: "directory", Path: "/"}, `{"type":"directory","path":"/","displayName":"/"}`},
		{Attachment{Type: "selection", FilePath: "/a/b.go", Selection: &Selection{}},
			`{"type":"selection","filePath":"/a/b.go","displayName":"b.go","text":"","selection":{"start":{"line":0,"character":0},"end":{"line":0,"character":0}}}`},
		{Attachment{Type: "github_reference", Number: 7, ReferenceType: "pr", URL: "u"},
			`{"type":"github_reference","url":"u","number":7,"title":"","referenceType":"pr","state":""}`},
		{Attachment{Type: "github_commit", Repo: repo, OID: "1", URL: "u"}, `{"type":"github_commit","url":"u","repo":{"name":"n","owner":"o"},"oid":"1","message":""}`},
		{Attachment{Type: "github_file_diff", URL: "u", Base: &GitHubRevision{Repo: *repo, Ref: "r", Path: "p"}},
			`{"type":"github_file_diff","url":"u","base":{"repo":{"name":"n","owner":"o"},"ref":"r","path":"p"}}`},
		{Attachment{Type: "github_url", URL: "u"}, `{"type":"github_url","url":"u"}`},
		{Attachment{Type: "blob", Data: "aGk=", MIMEType: "text/plain"}, `{"type":"blob","displayName":"attachment","data":"aGk=","mimeType":"text/plain"}`},
		{Attachment{Type: "blob", Data: png, MIMEType: "image/png"}, `{"type":"blob","displayName":"attachment","data":"iVBORw0KGgowMDAw","mimeType":"image/png"}`},
		{Attachment{Type: "extension_context", ExtensionID: "e", CapturedAt: &at, Payload: json.RawMessage(`1.0`)},
			`{"type":"extension_context","title":"","extensionId":"e","payload":1.0,"capturedAt":"2025-01-02T03:04:05Z"}`},

		{Attachment{}, ""},
		{Attachment{Type: "File", Path: "a"}, ""},
		{Attachment{Type: "file"}, ""},
		{Attachment{Type: "file", FilePath: "a"}, ""},
		{Attachment{Type: "file", Path: "a", URL: "u"}, ""},
		{Attachment{Type: "selection", FilePath: "a"}, ""},
		{Attachment{Type: "github_url", URL: "u", DisplayName: "d"}, ""},
		{Attachment{Type: "github_reference", Number: 7, ReferenceType: "mr", URL: "u"}, ""},
		{Attachment{Type: "github_commit", OID: "1", URL: "u"}, ""},
		{Attachment{Type: "blob", Data: "aGk="}, ""},
		{Attachment{Type: "blob", MIMEType: "text/plain"}, ""},
		{Attachment{Type: "blob", MIMEType: "text/plain", Data: "aGk"}, ""},
		{Attachment{Type: "blob", MIMEType: "text/plain", Data: "aG\nk="}, ""},
		{Attachment{Type: "blob", MIMEType: "text/plain", Data: "data:text/plain;base64,aGk="}, ""},
		{Attachment{Type: "github_file_diff", URL: "u", Head: &GitHubRevision{Repo: *repo, Ref: "r"}}, ""},
		{Attachment{Type: "github_tree_comparison", URL: "u", Head: &GitHubRevision{Revision: "r"}}, ""},
		{Attachment{Type: "github_tree_comparison", URL: "u", Head: &GitHubRevision{Revision: "r"}, Base: &GitHubRevision{Ref: "r", Path: "p"}}, ""},
		{Attachment{Type: "blob", MIMEType: "image/png", Data: "aGk="}, ""},
		{Attachment{Type: "extension_context", ExtensionID: "e", CapturedAt: &at, Payload: json.RawMessage(`{`)}, ""},
		{Attachment{Type: "extension_context", ExtensionID: "e"}, ""},
	} {
		raw, err := tc.a.encode()
		if string(raw) != tc.want || (err == nil) != (tc.want != "") {
			t.Errorf("%s: got %s, %v, want %s", tc.a.Type, raw, err, tc.want)
		}
	}

	// Every kind's members are fields, and every field belongs to a kind.
	left := map[string]bool{}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Attachment]()) {
		left[wireName(f)] = true
	}
	fields := fmt.Sprint(left)
	for _, kind := range []string{"file", "directory", "selection", "github_reference", "github_commit", "github_release", "github_actions_job",
		"github_repository", "github_file_diff", "github_tree_comparison", "github_url", "github_file", "github_snippet", "blob", "extension_context"} {
		for _, m := range strings.Fields(attachmentMembers(kind)) {
			m = strings.TrimRight(m, "!?")
			if !strings.Contains(fields, m+":") {
				t.Errorf("%s: no field for %s", kind, m)
			}
			delete(left, m)
		}
	}
	if delete(left, "type"); len(left) > 0 {
		t.Errorf("fields of no kind: %v", left)
	}
}

// helperCall is one helper: what it sends and what it makes of the answer.
type helperCall struct {
	name   string
	call   func(ctx context.Context, c *Client, s *Session) (any, error)
	method string
	params string // SESSION stands for the session's id
	result string
	want   any // nil for helpers that return no more than an error
}

func only(err error) (any, error) { return nil, err }

const stamp = `"2026-01-02T03:04:05.678Z"`

func helperCalls() []helperCall {
	type ctx = context.Context
	at := time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.UTC)
	yes := true
	return []helperCall{
		{"Ping", func(ctx ctx, c *Client, s *Session) (any, error) { return c.Ping(ctx, "a<b") }, "ping", `{"message":"a<b"}`,
			`{"message":"pong: a<b","timestamp":` + stamp + `,"protocolVersion":3}`, PingResult{"pong: a<b", at, 3}},
		{"Ping empty", func(ctx ctx, c *Client, s *Session) (any, error) { return c.Ping(ctx, "") }, "ping", `{}`, `{"message":"pong"}`, PingResult{Message: "pong"}},
		{"Status", func(ctx ctx, c *Client, s *Session) (any, error) { return c.Status(ctx) }, "status.get", `{}`,
			`{"version":"1.0.102","protocolVersion":3}`, Status{"1.0.102", 3}},
		{"AuthStatus", func(ctx ctx, c *Client, s *Session) (any, error) { return c.AuthStatus(ctx) }, "auth.getStatus", `{}`,
			`{"isAuthenticated":true,"authType":"user","host":"h","login":"l","statusMessage":"m"}`, AuthStatus{true, "user", "h", "l", "m"}},
		{"Quota", func(ctx ctx, c *Client, s *Session) (any, error) { return c.Quota(ctx) }, "account.getQuota", `{}`,
			`{"quotaSnapshots":{"chat":{"entitlementRequests":-1,"usedRequests":7,"remainingPercentage":99.5,"resetDate":` + stamp + `}}}`,
			Quota{map[string]QuotaSnapshot{"chat": {EntitlementRequests: -1, UsedRequests: 7, RemainingPercentage: 99.5, ResetDate: &at}}}},
		{"Sessions", func(ctx ctx, c *Client, s *Session) (any, error) { return c.Sessions(ctx, nil) }, "session.list", `{}`,
			`{"sessions":[{"sessionId":"a","startTime":` + stamp + `,"modifiedTime":` + stamp + `,"isRemote":false,"summary":"s","name":"n","clientName":"sdk","context":{"cwd":"/w","branch":"b"}},
			  {"sessionId":"b","isRemote":true,"repository":{"owner":"o","name":"r","branch":"b"},"remoteSessionIds":["x"],"pullRequestNumber":5,"resourceId":"i","taskType":"cli","state":"done"}]}`,
			[]SessionInfo{{SessionID: "a", StartTime: at, ModifiedTime: at, Summary: "s", Name: "n", ClientName: "sdk", Context: &WorkingDirectoryContext{CWD: "/w", Branch: "b"}},
				{SessionID: "b", IsRemote: true, Repository: &RemoteRepository{"o", "r", "b"}, RemoteSessionIDs: []string{"x"}, PullRequestNumber: 5, ResourceID: "i", TaskType: "cli", State: "done"}}},
		{"Sessions filter", func(ctx ctx, c *Client, s *Session) (any, error) {
			return c.Sessions(ctx, &SessionFilter{CWD: "/w", GitRoot: "/g", Repository: "o/r", Branch: "b"})
		}, "session.list", `{"filter":{"cwd":"/w","gitRoot":"/g","repository":"o/r","branch":"b"}}`, `{"sessions":[]}`, []SessionInfo{}},
		{"SessionInfo", func(ctx ctx, c *Client, s *Session) (any, error) { return c.SessionInfo(ctx, "x") }, "session.getMetadata", `{"sessionId":"x"}`,
			`{"session":{"sessionId":"x","isDetached":true}}`, &SessionInfo{SessionID: "x", IsDetached: true}},
		{"LastSessionID", func(ctx ctx, c *Client, s *Session) (any, error) { return c.LastSessionID(ctx) }, "session.getLastId", `{}`, `{"sessionId":"x"}`, "x"},
		{"ForegroundSessionID", func(ctx ctx, c *Client, s *Session) (any, error) { return c.ForegroundSessionID(ctx) }, "session.getForeground", `{}`, `{"sessionId":"x","workspacePath":"/w"}`, "x"},
		{"SetForegroundSessionID", func(ctx ctx, c *Client, s *Session) (any, error) { return only(c.SetForegroundSessionID(ctx, "x")) }, "session.setForeground", `{"sessionId":"x"}`, `{"success":true}`, nil},
		{"DeleteSession", func(ctx ctx, c *Client, s *Session) (any, error) { return only(c.DeleteSession(ctx, "x")) }, "session.delete", `{"sessionId":"x"}`, `{"success":true}`, nil},
		{"ForkSession", func(ctx ctx, c *Client, s *Session) (any, error) { return c.ForkSession(ctx, "x", "e") }, "sessions.fork", `{"sessionId":"x","toEventId":"e"}`, `{"sessionId":"y","name":"n"}`, "y"},
		{"ForkSession whole", func(ctx ctx, c *Client, s *Session) (any, error) { return c.ForkSession(ctx, "x", "") }, "sessions.fork", `{"sessionId":"x"}`, `{"sessionId":"y"}`, "y"},
		{"Client.SendTelemetry", func(ctx ctx, c *Client, s *Session) (any, error) {
			return only(c.SendTelemetry(ctx, TelemetryEvent{Kind: "k", Properties: map[string]string{"p": "v"}, Metrics: map[string]float64{"m": 1.5}}))
		}, "sendTelemetry", `{"clientName":"sdk","kind":"k","properties":{"p":"v"},"metrics":{"m":1.5}}`, `{}`, nil},
		{"Session.SendTelemetry", func(ctx ctx, c *Client, s *Session) (any, error) {
			return only(s.SendTelemetry(ctx, TelemetryEvent{Kind: "k", ClientName: "mine"}))
		}, "session.sendTelemetry", `{"sessionId":"SESSION","kind":"k"}`, `null`, nil},
		{"Model", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Model(ctx) }, "session.model.getCurrent", `{"sessionId":"SESSION"}`,
			`{"modelId":"m","reasoningEffort":"high","contextTier":"default","autoTier":"fast","pendingAutoTier":null}`, CurrentModel{"m", "high", "default", "fast"}},
		{"SetModel", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.SetModel(ctx, "m", nil)) }, "session.model.switchTo", `{"sessionId":"SESSION","modelId":"m"}`,
			`{"status":"applied","deferred":false,"modelId":"m"}`, nil},
		{"SetModel options", func(ctx ctx, c *Client, s *Session) (any, error) {
			return only(s.SetModel(ctx, "m", &ModelOptions{ReasoningEffort: "low", ReasoningSummary: "none", ContextTier: "default", AutoTier: "fast",
				ModelCapabilities: &ModelCapabilities{Supports: &ModelSupports{Vision: &yes}}}))
		}, "session.model.switchTo", `{"sessionId":"SESSION","modelId":"m","reasoningEffort":"low","reasoningSummary":"none","contextTier":"default","autoTier":"fast",
			"modelCapabilities":{"supports":{"vision":true}}}`, `{}`, nil},
		{"SetModel reset", func(ctx ctx, c *Client, s *Session) (any, error) {
			return only(s.SetModel(ctx, "m", &ModelOptions{ResetReasoningEffort: true}))
		}, "session.model.switchTo", `{"sessionId":"SESSION","modelId":"m","reasoningEffort":null}`, `{}`, nil},
		{"Mode", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Mode(ctx) }, "session.mode.get", `{"sessionId":"SESSION"}`, `"plan"`, AgentModePlan},
		{"SetMode", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.SetMode(ctx, AgentModeAutopilot)) }, "session.mode.set", `{"sessionId":"SESSION","mode":"autopilot"}`,
			`{"status":"unchanged","modelChanged":false,"modeApplied":true}`, nil},
		{"Name", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Name(ctx) }, "session.name.get", `{"sessionId":"SESSION"}`, `{"name":"n"}`, "n"},
		{"Name none", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Name(ctx) }, "session.name.get", `{"sessionId":"SESSION"}`, `{"name":null}`, ""},
		{"SetName", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.SetName(ctx, "n")) }, "session.name.set", `{"sessionId":"SESSION","name":"n"}`, `null`, nil},
		{"ReadPlan", func(ctx ctx, c *Client, s *Session) (any, error) { return s.ReadPlan(ctx) }, "session.plan.read", `{"sessionId":"SESSION"}`,
			`{"exists":true,"content":"# P","path":"/p"}`, Plan{true, "# P", "/p"}},
		{"ReadPlan none", func(ctx ctx, c *Client, s *Session) (any, error) { return s.ReadPlan(ctx) }, "session.plan.read", `{"sessionId":"SESSION"}`,
			`{"exists":false,"content":null,"path":"/p"}`, Plan{Path: "/p"}},
		{"UpdatePlan", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.UpdatePlan(ctx, "# P")) }, "session.plan.update", `{"sessionId":"SESSION","content":"# P"}`, `null`, nil},
		{"DeletePlan", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.DeletePlan(ctx)) }, "session.plan.delete", `{"sessionId":"SESSION"}`, `null`, nil},
		{"WorkspaceFiles", func(ctx ctx, c *Client, s *Session) (any, error) { return s.WorkspaceFiles(ctx) }, "session.workspaces.listFiles", `{"sessionId":"SESSION"}`,
			`{"files":["a","b/c"]}`, []string{"a", "b/c"}},
		{"ReadWorkspaceFile", func(ctx ctx, c *Client, s *Session) (any, error) { return s.ReadWorkspaceFile(ctx, "a") }, "session.workspaces.readFile", `{"sessionId":"SESSION","path":"a"}`,
			`{"content":"x"}`, "x"},
		{"CreateWorkspaceFile", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.CreateWorkspaceFile(ctx, "a", "x")) }, "session.workspaces.createFile",
			`{"sessionId":"SESSION","path":"a","content":"x"}`, `null`, nil},
		{"AnswerToolCall", func(ctx ctx, c *Client, s *Session) (any, error) {
			return only(s.AnswerToolCall(ctx, "r", ToolResult{Error: "no"}))
		}, "session.tools.handlePendingToolCall", `{"sessionId":"SESSION","requestId":"r","result":{"textResultForLlm":"no","resultType":"failure","error":"no"}}`, `{"success":true}`, nil},
		{"AnswerPermission", func(ctx ctx, c *Client, s *Session) (any, error) {
			return only(s.AnswerPermission(ctx, "r", Reject("f").WithContext(DecisionContext{Surface: "sdk"})))
		}, "session.permissions.handlePendingPermissionRequest",
			`{"sessionId":"SESSION","requestId":"r","result":{"kind":"reject","feedback":"f"},"decisionContext":{"surface":"sdk"}}`, `{"success":true}`, nil},
		{"StartFleet", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.StartFleet(ctx, "p")) }, "session.fleet.start", `{"sessionId":"SESSION","prompt":"p"}`, `{"started":true}`, nil},
		{"StartFleet alone", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.StartFleet(ctx, "")) }, "session.fleet.start", `{"sessionId":"SESSION"}`, `{"started":true}`, nil},
		{"Compact", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Compact(ctx) }, "session.history.compact", `{"sessionId":"SESSION"}`,
			`{"success":true,"tokensRemoved":9,"messagesRemoved":3,"summaryContent":"s","contextWindow":{"tokenLimit":6,"currentTokens":5,"messagesLength":4,"systemTokens":3,"conversationTokens":2,"toolDefinitionsTokens":1}}`,
			Compaction{true, 9, 3, "s", &ContextWindow{6, 5, 4, 3, 2, 1}}},
		{"Log", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.Log(ctx, "m", nil)) }, "session.log", `{"sessionId":"SESSION","message":"m"}`, `{"eventId":"e"}`, nil},
		{"Log options", func(ctx ctx, c *Client, s *Session) (any, error) {
			return only(s.Log(ctx, "m", &LogOptions{Level: LogError, Type: "t", Ephemeral: true, URL: "u", Tip: "x"}))
		}, "session.log", `{"sessionId":"SESSION","message":"m","level":"error","type":"t","ephemeral":true,"url":"u","tip":"x"}`, `{"eventId":"e"}`, nil},
		{"Agents", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Agents(ctx) }, "session.agent.list", `{"sessionId":"SESSION"}`,
			`{"agents":[{"id":"i","name":"n","displayName":"d","description":"x","tools":[],"source":"user"}]}`,
			[]AgentInfo{{ID: "i", Name: "n", DisplayName: "d", Description: "x", Tools: &[]string{}, Source: "user"}}},
		{"Agent", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Agent(ctx) }, "session.agent.getCurrent", `{"sessionId":"SESSION"}`, `{"agent":{"id":"i"}}`, &AgentInfo{ID: "i"}},
		{"Agent none", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Agent(ctx) }, "session.agent.getCurrent", `{"sessionId":"SESSION"}`, `{"agent":null}`, (*AgentInfo)(nil)},
		{"SelectAgent", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.SelectAgent(ctx, "n")) }, "session.agent.select", `{"sessionId":"SESSION","name":"n"}`, `{"agent":{}}`, nil},
		{"SelectAgent none", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.SelectAgent(ctx, "")) }, "session.agent.deselect", `{"sessionId":"SESSION"}`, `{}`, nil},
		{"Skills", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Skills(ctx) }, "session.skills.list", `{"sessionId":"SESSION"}`,
			`{"skills":[{"name":"n","description":"d","source":"builtin","enabled":true}]}`, []LoadedSkill{{Name: "n", Description: "d", Source: "builtin", Enabled: true}}},
		{"MCPServers", func(ctx ctx, c *Client, s *Session) (any, error) { return s.MCPServers(ctx) }, "session.mcp.list", `{"sessionId":"SESSION"}`,
			`{"servers":[{"name":"n","status":"needs-auth"}],"host":{"clients":[]}}`, []LoadedMCPServer{{Name: "n", Status: "needs-auth"}}},
		{"Tools", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Tools(ctx) }, "session.tools.getCurrentMetadata", `{"sessionId":"SESSION"}`,
			`{"tools":[{"name":"n","description":"d","input_schema":{"type":"object"},"mcpServerName":"s","mcpToolName":"t","namespacedName":"s/t","deferLoading":true}]}`,
			[]ToolInfo{{"n", "s/t", "s", "t", "d", json.RawMessage(`{"type":"object"}`), true}}},
		{"Tools none", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Tools(ctx) }, "session.tools.getCurrentMetadata", `{"sessionId":"SESSION"}`, `{"tools":null}`, []ToolInfo(nil)},
		{"Tasks", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Tasks(ctx) }, "session.tasks.list", `{"sessionId":"SESSION"}`,
			`{"tasks":[{"type":"shell","id":"1","description":"d","status":"running","startedAt":` + stamp + `,"command":"c","pid":42,"logPath":"/l"},
			  {"type":"agent","id":"2","status":"idle","completedAt":` + stamp + `,"toolCallId":"t","agentType":"task","prompt":"p","latestResponse":"r","displayName":"n","error":"e"}]}`,
			[]TaskInfo{{Type: "shell", ID: "1", Description: "d", Status: "running", StartedAt: at, Command: "c", PID: 42, LogPath: "/l"},
				{Type: "agent", ID: "2", Status: "idle", CompletedAt: &at, ToolCallID: "t", AgentType: "task", Prompt: "p", LatestResponse: "r", DisplayName: "n", Error: "e"}}},
		{"CancelTask", func(ctx ctx, c *Client, s *Session) (any, error) { return s.CancelTask(ctx, "1") }, "session.tasks.cancel", `{"sessionId":"SESSION","id":"1"}`, `{"cancelled":true}`, true},
		{"Queue", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Queue(ctx) }, "session.queue.pendingItems", `{"sessionId":"SESSION"}`,
			`{"items":[{"id":"q","messageId":"m","kind":"message","displayText":"t","agentMode":"plan","source":"s"}],"steeringMessages":["x"]}`,
			Queue{[]QueueItem{{"q", "m", "message", "t", AgentModePlan, "s"}}, []string{"x"}}},
		{"ClearQueue", func(ctx ctx, c *Client, s *Session) (any, error) { return only(s.ClearQueue(ctx)) }, "session.queue.clear", `{"sessionId":"SESSION"}`, `null`, nil},
		{"Usage", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Usage(ctx) }, "session.usage.getMetrics", `{"sessionId":"SESSION"}`,
			`{"totalPremiumRequestCost":0.5,"totalUserRequests":2,"totalNanoAiu":0.25,"totalApiDurationMs":17,"sessionStartTime":` + stamp + `,"currentModel":"m",
			  "codeChanges":{"linesAdded":1,"linesRemoved":2,"filesModified":["f"]},"modelMetrics":{"m":{"requests":{"count":1,"cost":0.5},"usage":{"inputTokens":5295,"outputTokens":2}}},
			  "agentMetrics":{"main":{"totalApiDurationMs":17}},"tokenDetails":{"input":{"tokenCount":3}},"lastCallInputTokens":4,"lastCallOutputTokens":5}`,
			Usage{at, "m", 0.5, 2, 0.25, 17, map[string]TokenCount{"input": {3}},
				map[string]ModelMetric{"m": {Requests: ModelRequests{Count: 1, Cost: 0.5}, Usage: ModelUsage{InputTokens: 5295, OutputTokens: 2}}},
				map[string]AgentMetric{"main": {TotalAPIDurationMs: 17}}, CodeChanges{LinesAdded: 1, LinesRemoved: 2, FilesModified: []string{"f"}}, 4, 5}},
		{"PermissionMode", func(ctx ctx, c *Client, s *Session) (any, error) { return s.PermissionMode(ctx) }, "session.permissions.getMode", `{"sessionId":"SESSION"}`, `{"mode":"manual"}`, PermissionsManual},
		{"SetPermissionMode", func(ctx ctx, c *Client, s *Session) (any, error) {
			return only(s.SetPermissionMode(ctx, PermissionsAllowAll))
		}, "session.permissions.setMode",
			`{"sessionId":"SESSION","mode":"allow-all"}`, `{"success":true,"mode":"allow-all"}`, nil},
		{"Truncate", func(ctx ctx, c *Client, s *Session) (any, error) { return s.Truncate(ctx, "e") }, "session.history.truncate", `{"sessionId":"SESSION","eventId":"e"}`, `{"eventsRemoved":4}`, 4},
	}
}

func sameJSON(a, b []byte) bool {
	var x, y any
	return json.Unmarshal(a, &x) == nil && json.Unmarshal(b, &y) == nil && reflect.DeepEqual(x, y)
}

func TestHelperCalls(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	answered := make(map[string]int)
	for _, tt := range helperCalls() {
		t.Run(tt.name, func(t *testing.T) {
			ctx := testContext(t)
			run := func(result any) (any, error) {
				p.handle(tt.method, func(*peer, peerMessage) any { return result })
				answered[tt.method]++
				return tt.call(ctx, c, s)
			}
			got, err := run(json.RawMessage(tt.result))
			if err != nil || !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got %+v, error %v, want %+v", got, err, tt.want)
			}
			calls := p.calls(tt.method)
			params := strings.ReplaceAll(tt.params, "SESSION", s.ID())
			if len(calls) == 0 || !sameJSON(calls[len(calls)-1].Params, []byte(params)) {
				t.Fatalf("sent %s, want %s", calls[len(calls)-1].Params, params)
			}
			for _, empty := range []string{"null", "{}", `{ "fromTheFuture": {"a": [1]} }`} {
				got, err := run(json.RawMessage(empty))
				if err != nil || got != nil && !reflect.ValueOf(got).IsZero() {
					t.Errorf("result %s: got %+v, error %v, want nothing", empty, got, err)
				}
			}
			if tt.want != nil {
				bad := []string{"7", "[1]"}
				if i := strings.Index(tt.result, stamp); i >= 0 {
					bad = append(bad, tt.result[:i]+`"`+strings.Repeat("x", 1<<16)+`"`+tt.result[i+len(stamp):])
				}
				for _, odd := range bad {
					got, err := run(json.RawMessage(odd))
					if err == nil || len(err.Error()) > 512 || !strings.Contains(err.Error(), tt.method) || got != nil && !reflect.ValueOf(got).IsZero() {
						t.Errorf("result %.40s: got %.60v, error %.600v, want a short error that names the method", odd, got, err)
					}
					var which *SessionError
					if ofSession := strings.Contains(tt.params, `"sessionId"`); errors.As(err, &which) != ofSession {
						t.Errorf("result %.40s: error is %T, names the session: %t, want %t", odd, err, !ofSession, ofSession)
					}
				}
			}
			_, err = run(&peerError{Code: -32601, Message: "Unhandled method " + tt.method, Data: json.RawMessage(`{"a":1}`)})
			var refused *RPCError
			if !errors.As(err, &refused) || refused.Method != tt.method || string(refused.Data) != `{"a":1}` || !errors.Is(err, ErrNotSupported) {
				t.Errorf("refused: got %v, want the server's error", err)
			}
		})
	}
	for method, n := range answered {
		if got := len(p.calls(method)); got < n {
			t.Errorf("%s was sent %d times for %d calls", method, got, n)
		}
	}
	if err := s.Disconnect(testContext(t)); err != nil {
		t.Fatal(err)
	}
	before := len(p.calls(""))
	for _, tt := range helperCalls() {
		if strings.Contains(tt.params, "SESSION") {
			var which *SessionError
			if _, err := tt.call(testContext(t), c, s); !errors.Is(err, ErrClosed) || !errors.As(err, &which) || which.SessionID != s.ID() {
				t.Errorf("%s after Disconnect: got %v, want ErrClosed", tt.name, err)
			}
		}
	}
	if got := len(p.calls("")); got != before {
		t.Errorf("%d requests after Disconnect", got-before)
	}
}

// TestHelperRefusals has the answers that say in their body that nothing was done.
func TestHelperRefusals(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	ctx := testContext(t)
	for _, tt := range []struct {
		method string
		call   func(id string) error
	}{
		{"session.delete", func(id string) error { return c.DeleteSession(ctx, id) }},
		{"session.setForeground", func(id string) error { return c.SetForegroundSessionID(ctx, id) }},
		{"session.permissions.setMode", func(string) error { return s.SetPermissionMode(ctx, PermissionsAllowAll) }},
		{"session.abort", func(string) error { return s.Abort(ctx) }},
		{hdlTool, func(string) error { return s.AnswerToolCall(ctx, "r", ToolResult{}) }},
		{hdlPermission, func(string) error { return s.AnswerPermission(ctx, "r", ApproveOnce()) }},
	} {
		words := "Session file not found for " + s.ID()
		p.handle(tt.method, func(*peer, peerMessage) any { return map[string]any{"success": false, "error": words} })
		err := tt.call(s.ID())
		var refused *RPCError
		var which *SessionError
		if !errors.As(err, &refused) || refused.Method != tt.method || refused.Message != words || !errors.Is(err, ErrSessionNotFound) {
			t.Errorf("%s: got %v, want the server's refusal", tt.method, err)
		} else if !errors.As(err, &which) || which.SessionID != s.ID() || strings.Contains(err.Error(), s.ID()) {
			t.Errorf("%s: got %v, want an error that has the id and does not show it", tt.method, err)
		}
	}
	p.handle("session.fleet.start", func(*peer, peerMessage) any { return map[string]any{"started": false} })
	var refused *RPCError
	if err := s.StartFleet(ctx, ""); !errors.As(err, &refused) {
		t.Errorf("fleet: got %v, want a refusal", err)
	}
	if err := s.Context().Err(); err != nil {
		t.Errorf("the session has ended: %v", context.Cause(s.Context()))
	}

	before := len(p.calls(""))
	for name, err := range map[string]error{
		"zero decision": s.AnswerPermission(ctx, "r", PermissionDecision{}),
		"no result":     s.AnswerPermission(ctx, "r", NoResult()),
		"unknown type":  s.AnswerToolCall(ctx, "r", ToolResult{Type: "odd"}),
		"level":         s.Log(ctx, "m", &LogOptions{Level: "loud"}),
		"effort":        s.SetModel(ctx, "m", &ModelOptions{ReasoningEffort: "high", ResetReasoningEffort: true}),
	} {
		if !errors.Is(err, ErrInvalidConfig) {
			t.Errorf("%s: got %v, want ErrInvalidConfig", name, err)
		}
	}
	if got := len(p.calls("")); got != before {
		t.Errorf("%d requests for invalid parameters", got-before)
	}
}

func TestSessionInfoNone(t *testing.T) {
	c, _ := newPeer(t, nil) // which answers {}
	if info, err := c.SessionInfo(testContext(t), "x"); info != nil || err != nil {
		t.Errorf("got %v, %v, want nothing", info, err)
	}
}

func TestDeleteSessionEndsIt(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	sub := s.Subscribe()
	defer sub.Close()
	p.handle("session.delete", func(*peer, peerMessage) any { return map[string]any{"success": true} })
	if err := c.DeleteSession(testContext(t), s.ID()); err != nil {
		t.Fatal(err)
	}
	await(t, "the session's end", s.Context().Done())
	if _, err := sub.Next(testContext(t)); !errors.Is(err, ErrSessionNotFound) {
		t.Errorf("sequence ends with %v", err)
	}
	if _, err := s.Send(testContext(t), Message{}); !errors.Is(err, ErrSessionNotFound) {
		t.Errorf("send: %v", err)
	}
	if n := len(p.calls("session.destroy")); n != 0 {
		t.Errorf("%d destroys for a session that is gone", n)
	}
	if _, err := c.CreateSession(testContext(t), &SessionConfig{SessionID: s.ID()}); err != nil {
		t.Errorf("again under its id: %v", err)
	}
}

func TestModelsSingleFlight(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	release := make(chan any)
	p.handle("models.list", func(p *peer, m peerMessage) any {
		go func() { p.answer(m.ID, <-release) }() // ends with the test, which answers every request
		return noAnswer
	})
	ctx := testContext(t)

	// Callers whose ctx ends leave; the call goes on for the others.
	leaving, leave := context.WithCancel(ctx)
	left := async(func() error { _, err := c.Models(leaving); return err })
	p.wait("models.list", 1)
	const others = 8
	lists := make(chan []Model, others)
	results := make(chan error, others)
	for range others {
		go func() { // ends with the answer
			list, err := c.Models(ctx)
			lists <- list
			results <- err
		}()
	}
	for joined := 0; joined < others+1 && ctx.Err() == nil; runtime.Gosched() { // until all wait for the same load
		c.models.mu.Lock()
		joined = c.models.load.waiting
		c.models.mu.Unlock()
	}
	leave()
	if err := await(t, "caller that left", left); !errors.Is(err, context.Canceled) {
		t.Errorf("left with %v", err)
	}
	release <- &peerError{Code: -32603, Message: "Not authenticated. Please authenticate first."}
	for range others {
		await(t, "list", lists)
		if err := await(t, "result", results); !errors.Is(err, ErrAuthentication) {
			t.Errorf("got %v, want ErrAuthentication", err)
		}
	}

	// Errors are not kept. A call that nobody waits for is given up, and its answer with it.
	gone, cancel := context.WithCancel(ctx)
	left = async(func() error { _, err := c.Models(gone); return err })
	p.wait("models.list", 2)
	cancel()
	await(t, "last caller", left)
	release <- map[string]any{"models": []any{map[string]any{"id": "stale"}}}
	p.sync()

	again := async(func() error {
		list, err := c.Models(ctx)
		if err == nil && (len(list) != 1 || list[0].ID != "m" || *list[0].Capabilities.Limits.MaxPromptTokens != 5 || list[0].Capabilities.Supports == nil) {
			err = fmt.Errorf("got %+v", list)
		}
		return err
	})
	p.wait("models.list", 3)
	release <- map[string]any{"models": []any{map[string]any{"id": "m", "capabilities": map[string]any{"limits": map[string]any{"max_prompt_tokens": 5}}}}}
	if err := await(t, "models", again); err != nil {
		t.Fatal(err)
	}

	// A success is kept, and every caller has a list of its own.
	first, err := c.Models(ctx)
	if err != nil {
		t.Fatal(err)
	}
	first[0].ID, *first[0].Capabilities.Limits.MaxPromptTokens = "changed", 0
	second, err := c.Models(ctx)
	if err != nil || second[0].ID != "m" || *second[0].Capabilities.Limits.MaxPromptTokens != 5 {
		t.Errorf("got %+v, %v after another caller changed its list", second, err)
	}
	if n := len(p.calls("models.list")); n != 3 {
		t.Errorf("%d requests, want 3", n)
	}
	if _, err := c.Models(gone); !errors.Is(err, context.Canceled) {
		t.Errorf("with a ctx that is done: %v", err)
	}
	if err := c.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Models(ctx); !errors.Is(err, ErrClosed) {
		t.Errorf("after Stop: %v", err)
	}
}

func TestModelsBadAnswer(t *testing.T) {
	c, p := newPeer(t, nil)
	for _, bad := range []string{`{"models":7}`, `{"models":[{"id":1}]}`, `[]`} {
		p.handle("models.list", func(*peer, peerMessage) any { return json.RawMessage(bad) })
		if list, err := c.Models(testContext(t)); err == nil {
			t.Errorf("%s: got %v", bad, list)
		}
	}
	p.handle("models.list", func(*peer, peerMessage) any { return json.RawMessage(`null`) })
	for range 2 {
		if list, err := c.Models(testContext(t)); err != nil || len(list) != 0 {
			t.Errorf("null: got %v, %v", list, err)
		}
	}
	if n := len(p.calls("models.list")); n != 4 {
		t.Errorf("%d requests: an error was kept, or a success was not", n)
	}
}

func TestListModels(t *testing.T) {
	leakCheck(t)
	var calls atomic.Int32
	full := make([]Model, 2)
	fill(reflect.ValueOf(&full).Elem(), "", false)
	for i := range full {
		full[i].Metadata, full[i].WarningText = json.RawMessage(`{"a":1}`), nil
		full[i].Billing.TokenPrices, full[i].Billing.Promo = nil, nil
	}
	boom := errors.New("boom")
	c, p := newPeer(t, &Options{ListModels: func(ctx context.Context) ([]Model, error) {
		switch calls.Add(1) {
		case 1:
			return nil, boom
		case 2:
			panic("boom")
		}
		return full, nil
	}})
	if _, err := c.Models(testContext(t)); !errors.Is(err, boom) {
		t.Errorf("got %v, want the handler's error", err)
	}
	if _, err := c.Models(testContext(t)); err == nil {
		t.Error("no error from a handler that panicked")
	}
	for range 2 {
		list, err := c.Models(testContext(t))
		if err != nil || !reflect.DeepEqual(list, full) {
			t.Errorf("got %+v, %v, want %+v", list, err, full)
		}
		list[0].SupportedContextTiers[0] = "changed"
	}
	if n := calls.Load(); n != 3 {
		t.Errorf("%d calls, want 3", n)
	}
	if n := len(p.calls("models.list")); n != 0 {
		t.Errorf("the server was asked %d times", n)
	}
}

// A list handler that returns when its callers have gone disturbs nobody.
func TestListModelsLate(t *testing.T) {
	leakCheck(t)
	calls := make(chan chan []Model)
	c, _ := newPeer(t, &Options{ListModels: func(context.Context) ([]Model, error) {
		release := make(chan []Model)
		calls <- release
		return <-release, nil
	}})
	ctx, cancel := context.WithCancel(testContext(t))
	gone := async(func() error { _, err := c.Models(ctx); return err })
	releaseFirst := await(t, "first call", calls)
	c.models.mu.Lock()
	first := c.models.load
	c.models.mu.Unlock()
	cancel()
	await(t, "first caller", gone)
	second := async(func() error {
		list, err := c.Models(testContext(t))
		if err == nil && list[0].ID != "new" {
			err = fmt.Errorf("got %+v", list)
		}
		return err
	})
	releaseSecond := await(t, "second call", calls)
	releaseFirst <- []Model{{ID: "old"}}
	await(t, "first load", first.done)
	c.models.mu.Lock()
	if c.models.load == nil || c.models.list != nil {
		t.Error("the first load took the second one's place")
	}
	c.models.mu.Unlock()
	releaseSecond <- []Model{{ID: "new"}}
	if err := await(t, "second caller", second); err != nil {
		t.Error(err)
	}
}

// A list handler that never returns keeps neither its callers nor the client.
func TestListModelsHangs(t *testing.T) {
	hang, called := make(chan struct{}), make(chan struct{})
	defer close(hang)
	c, _ := newPeer(t, &Options{ListModels: func(context.Context) ([]Model, error) {
		close(called)
		<-hang
		return nil, nil
	}})
	result := async(func() error { _, err := c.Models(context.Background()); return err })
	await(t, "handler", called)
	c.ForceStop()
	if err := await(t, "caller", result); !errors.Is(err, ErrClosed) {
		t.Errorf("got %v, want ErrClosed", err)
	}
}

// TestLogEndsNoTurn has the ways in which a Log's own error event, its answer, an error of the turn's and the turn's end can follow each other.
// Each step is one write of the server's: a is the answer to the Log and to the send, e an event.
func TestLogEndsNoTurn(t *testing.T) {
	const id = "own"
	for _, tt := range []struct {
		name  string
		steps string // what the server sends, in this order
		fails bool   // the turn ends with an error
	}{
		{"event, answer", "sent user own answer done", false},
		{"answer, event", "sent user answer own done", false},
		{"before the turn's message, event first", "sent own answer user done", false},
		{"before the turn's message, answer first", "sent answer own user done", false},
		{"before the send's answer, event first", "user own answer sent done", false},
		{"before the send's answer, answer first", "user answer own sent done", false},
		{"send answered between event and answer", "user own sent answer done", false},
		{"end before the answer", "sent user own done answer", false},
		{"real error, own, answer", "sent user real own answer idle", true},
		{"own, real error, answer", "sent user own real answer idle", true},
		{"real error while the Log is unanswered, its event last", "sent user real answer own idle", true},
		{"real error and end before the answer", "sent user real idle answer own", true},
		{"real error, own and end before the answer", "sent user real own idle answer", true},
		{"Log refused", "sent user real refuse idle", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			leakCheck(t)
			c, p := newPeer(t, nil)
			s := createSession(t, c, nil)
			hold := func(*peer, peerMessage) any { return noAnswer }
			p.handle("session.send", hold)
			p.handle("session.log", hold)
			type outcome struct {
				m   *AssistantMessage
				err error
			}
			turn := make(chan outcome, 1)
			go func() { // ends with the turn
				m, err := s.SendAndWait(testContext(t), Message{Prompt: "x"})
				turn <- outcome{m, err}
			}()
			send := p.wait("session.send", 1)
			logged := async(func() error { return s.Log(testContext(t), "m", &LogOptions{Level: LogError}) })
			log := p.wait("session.log", 1)
			failure := map[string]any{"errorType": "notification", "message": "m"}
			for _, step := range strings.Fields(tt.steps) {
				switch step {
				case "sent":
					p.answer(send.ID, map[string]any{"messageId": "m1"})
				case "user":
					p.emit(s.ID(), "user.message", map[string]any{"content": "x", "messageId": "m1"})
				case "own":
					p.emit(s.ID(), "session.error", failure, "id", id)
				case "real":
					p.emit(s.ID(), "session.error", map[string]any{"errorType": "query", "message": "real"}, "id", "other")
				case "answer":
					p.answer(log.ID, map[string]any{"eventId": id})
				case "refuse":
					p.answer(log.ID, &peerError{Code: -32603, Message: "no"})
				case "done":
					p.send(p.event(s.ID(), "assistant.message", map[string]any{"messageId": "a", "content": "good"}), p.event(s.ID(), "session.idle", nil))
				case "idle":
					p.emit(s.ID(), "session.idle", nil)
				}
			}
			got := await(t, "turn", turn)
			var agent *AgentError
			switch {
			case !tt.fails && (got.err != nil || got.m == nil || got.m.Content != "good"):
				t.Errorf("got %+v, %v, want the turn's message", got.m, got.err)
			case tt.fails && (!errors.As(got.err, &agent) || agent.Message != "real"):
				t.Errorf("got %+v, %v, want the turn's error", got.m, got.err)
			}
			if err := await(t, "log", logged); err != nil && !strings.Contains(tt.steps, "refuse") {
				t.Error(err)
			}
			p.sync()
			s.mu.Lock()
			if ts := &s.turns; ts.logging != 0 || len(ts.logged) != 0 || len(ts.recent) != 0 || ts.busy {
				t.Errorf("left behind: %+v", ts)
			}
			s.mu.Unlock()

			// The next turn starts clean.
			p.handle("session.send", func(*peer, peerMessage) any { return map[string]any{"messageId": "m2"} })
			next := async(func() error { _, err := s.SendAndWait(testContext(t), Message{}); return err })
			p.wait("session.send", 2)
			p.sync()
			p.send(p.event(s.ID(), "user.message", map[string]any{"messageId": "m2"}), p.event(s.ID(), "session.idle", nil))
			if err := await(t, "next turn", next); err != nil {
				t.Error(err)
			}
		})
	}
}

// A Log whose caller has gone still counts: its event may come.
func TestLogCancelled(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	p.handle("session.log", func(*peer, peerMessage) any { return noAnswer })
	ctx, cancel := context.WithCancel(testContext(t))
	logged := async(func() error { return s.Log(ctx, "m", &LogOptions{Level: LogError}) })
	log := p.wait("session.log", 1)
	cancel()
	if err := await(t, "log", logged); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	turn := async(func() error { _, err := s.SendAndWait(testContext(t), Message{}); return err })
	p.wait("session.send", 1)
	p.sync()
	p.emit(s.ID(), "user.message", map[string]any{"messageId": "m1"})
	p.emit(s.ID(), "session.error", map[string]any{"message": "m"}, "id", "own")
	p.answer(log.ID, map[string]any{"eventId": "own"})
	p.emit(s.ID(), "session.idle", nil)
	if err := await(t, "turn", turn); err != nil {
		t.Error(err)
	}
	if _, err := c.Ping(ctx, ""); !errors.Is(err, context.Canceled) { // the same ctx, before anything is written
		t.Error(err)
	}
	if err := s.Log(ctx, "m", &LogOptions{Level: LogError}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.turns.logging != 0 {
		t.Errorf("%d Logs in flight", s.turns.logging)
	}
}

func TestCapabilitiesAndCanvases(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	canvas := func(id, title string) map[string]any {
		return map[string]any{"instanceId": id, "extensionId": "x", "canvasId": "c", "title": title, "input": map[string]any{"n": 1}}
	}
	// What follows the answer in the same write is newer than the answer, whichever goroutine takes that over.
	p.handle("session.create", func(p *peer, m peerMessage) any {
		id := m.get("sessionId").(string)
		p.send(map[string]any{"jsonrpc": "2.0", "id": m.ID, "result": map[string]any{"sessionId": id, "workspacePath": "/w", "remoteUrl": "u",
			"capabilities": map[string]any{"ui": map[string]any{"elicitation": false, "canvases": true}, "extensions": true},
			"openCanvases": []any{canvas("1", "one"), canvas("2", "two")}}},
			p.event(id, "capabilities.changed", map[string]any{"ui": map[string]any{"elicitation": true}}),
			p.event(id, "session.canvas.closed", map[string]any{"instanceId": "1"}))
		return noAnswer
	})
	s := createSession(t, c, nil)
	p.sync()
	if want := (Capabilities{UI: UICapabilities{Elicitation: true, Canvases: true}, Extensions: true}); s.Capabilities() != want {
		t.Errorf("capabilities are %+v, want %+v", s.Capabilities(), want)
	}
	if s.WorkspacePath() != "/w" || s.RemoteURL() != "u" {
		t.Errorf("workspace %q, URL %q", s.WorkspacePath(), s.RemoteURL())
	}
	titles := func() (list []string) {
		for _, c := range s.OpenCanvases() {
			list = append(list, c.InstanceID+" "+c.Title)
		}
		return list
	}
	check := func(what string, want ...string) {
		t.Helper()
		if got := titles(); !slices.Equal(got, want) {
			t.Errorf("%s: canvases are %q, want %q", what, got, want)
		}
	}
	check("start", "2 two")

	// An event's effect is there before a subscriber can see the event.
	sub := s.Subscribe()
	defer sub.Close()
	for _, tt := range []struct {
		typ  string
		data any
		want []string
	}{
		{"session.canvas.opened", canvas("3", "three"), []string{"2 two", "3 three"}},
		{"session.canvas.opened", canvas("2", "new"), []string{"2 new", "3 three"}},
		{"session.canvas.opened", canvas("", "none"), []string{"2 new", "3 three"}},
		{"session.canvas.opened", map[string]any{"instanceId": 7}, []string{"2 new", "3 three"}},
		{"session.canvas.closed", map[string]any{"instanceId": ""}, []string{"2 new", "3 three"}},
		{"session.canvas.closed", map[string]any{"instanceId": "9"}, []string{"2 new", "3 three"}},
		{"session.canvas.closed", nil, []string{"2 new", "3 three"}},
		{"session.canvas.closed", map[string]any{"instanceId": "2"}, []string{"3 three"}},
	} {
		p.emit(s.ID(), tt.typ, tt.data)
		next(t, sub)
		check(tt.typ, tt.want...)
	}
	mine := s.OpenCanvases()
	mine[0].Title, mine[0].Input[0] = "changed", 'X'
	check("after a caller changed its copy", "3 three")
	if got := s.OpenCanvases()[0].Input[0]; got != '{' {
		t.Errorf("input begins with %c", got)
	}

	for _, tt := range []struct {
		data any
		want Capabilities
	}{
		{map[string]any{"ui": map[string]any{"mcpApps": true}}, Capabilities{UICapabilities{true, true, true}, true}},
		{map[string]any{"ui": map[string]any{"elicitation": false}, "extensions": nil}, Capabilities{UICapabilities{false, true, true}, true}},
		{map[string]any{"ui": nil}, Capabilities{UICapabilities{false, true, true}, true}},
		{map[string]any{"ui": map[string]any{"canvases": "no", "elicitation": true}}, Capabilities{UICapabilities{true, true, true}, true}},
		{[]any{1}, Capabilities{UICapabilities{true, true, true}, true}},
		{nil, Capabilities{UICapabilities{true, true, true}, true}},
		{map[string]any{"extensions": false}, Capabilities{UICapabilities{true, true, true}, false}},
	} {
		p.emit(s.ID(), "capabilities.changed", tt.data)
		next(t, sub)
		if got := s.Capabilities(); got != tt.want {
			t.Errorf("after %v: %+v, want %+v", tt.data, got, tt.want)
		}
	}
}

// elicitingPeer returns a session whose clients can show forms.
func elicitingPeer(t *testing.T) (*Session, *peer) {
	c, p := newPeer(t, nil)
	p.handle("session.create", func(p *peer, m peerMessage) any {
		return map[string]any{"sessionId": m.get("sessionId"), "capabilities": map[string]any{"ui": map[string]any{"elicitation": true}}}
	})
	return createSession(t, c, nil), p
}

func TestUI(t *testing.T) {
	leakCheck(t)
	s, p := elicitingPeer(t)
	ctx := testContext(t)
	type answer = map[string]any
	confirm := func(result any) (any, bool, error) {
		p.handle("session.ui.elicitation", func(*peer, peerMessage) any { return result })
		yes, err := s.UI().Confirm(ctx, "m")
		return yes, yes, err
	}
	choose := func(result any) (any, bool, error) {
		p.handle("session.ui.elicitation", func(*peer, peerMessage) any { return result })
		return s.UI().Select(ctx, "m", []string{"a", "b"})
	}
	input := func(result any) (any, bool, error) {
		p.handle("session.ui.elicitation", func(*peer, peerMessage) any { return result })
		return s.UI().Input(ctx, "m", &InputOptions{Title: "t", Description: "d", MinLength: 1, MaxLength: 9, Format: "email", Default: "x"})
	}
	for _, tt := range []struct {
		name   string
		call   func(result any) (any, bool, error)
		params string
		result any
		want   any
		ok     bool
	}{
		{"confirm yes", confirm, `{"type":"boolean","default":true}`, answer{"action": "accept", "content": answer{"confirmed": true}}, true, true},
		{"confirm no", confirm, "", answer{"action": "accept", "content": answer{"confirmed": false}}, false, false},
		{"confirm text", confirm, "", answer{"action": "accept", "content": answer{"confirmed": "true"}}, false, false},
		{"confirm declined", confirm, "", answer{"action": "decline", "content": answer{"confirmed": true}}, false, false},
		{"confirm null", confirm, "", nil, false, false},
		{"select", choose, `{"type":"string","enum":["a","b"]}`, answer{"action": "accept", "content": answer{"selection": "b"}}, "b", true},
		{"select number", choose, "", answer{"action": "accept", "content": answer{"selection": 1}}, "", false},
		{"select cancelled", choose, "", answer{"action": "cancel"}, "", false},
		{"input", input, `{"type":"string","title":"t","description":"d","minLength":1,"maxLength":9,"format":"email","default":"x"}`,
			answer{"action": "accept", "content": answer{"value": ""}}, "", true},
		{"input list", input, "", answer{"action": "accept", "content": answer{"value": []string{"a"}}}, "", false},
		{"input without content", input, "", answer{"action": "accept"}, "", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, ok, err := tt.call(tt.result)
			if err != nil || got != tt.want || ok != tt.ok {
				t.Errorf("got %v, %v, %v, want %v, %v", got, ok, err, tt.want, tt.ok)
			}
			calls := p.calls("session.ui.elicitation")
			var sent struct {
				Message         string
				RequestedSchema struct {
					Type       string
					Properties map[string]json.RawMessage
					Required   []string
				}
			}
			if err := json.Unmarshal(calls[len(calls)-1].Params, &sent); err != nil {
				t.Fatal(err)
			}
			if r := sent.RequestedSchema; sent.Message != "m" || r.Type != "object" || len(r.Required) != 1 || len(r.Properties) != 1 {
				t.Fatalf("sent %+v", sent)
			}
			field := sent.RequestedSchema.Properties[sent.RequestedSchema.Required[0]]
			if tt.params != "" && !sameJSON(field, []byte(tt.params)) {
				t.Errorf("field is %s, want %s", field, tt.params)
			}
		})
	}
	if _, _, err := choose(answer{"action": "accept", "content": answer{"selection": "z"}}); err == nil {
		t.Error("no error for an answer that was no option")
	}
	if _, _, err := s.UI().Select(ctx, "m", nil); !errors.Is(err, ErrInvalidConfig) {
		t.Errorf("no options: got %v, want ErrInvalidConfig", err)
	}
	if _, err := s.UI().Elicit(ctx, "m", func() {}); !errors.Is(err, ErrInvalidConfig) {
		t.Errorf("no schema: got %v, want ErrInvalidConfig", err)
	}
	p.handle("session.ui.elicitation", func(*peer, peerMessage) any { return answer{"action": "accept", "content": answer{"n": 1}} })
	if _, err := s.UI().Elicit(ctx, "m", json.RawMessage(`{"type":"object"}`)); err != nil {
		t.Error(err)
	}
	calls := p.calls("session.ui.elicitation")
	if want := fmt.Sprintf(`{"sessionId":%q,"message":"m","requestedSchema":{"type":"object"}}`, s.ID()); !sameJSON(calls[len(calls)-1].Params, []byte(want)) {
		t.Errorf("sent %s, want %s", calls[len(calls)-1].Params, want)
	}
}

func TestUIRefused(t *testing.T) {
	leakCheck(t)
	s, p := elicitingPeer(t)
	p.emit(s.ID(), "capabilities.changed", map[string]any{"ui": map[string]any{"elicitation": false}})
	p.sync()
	ctx := testContext(t)
	before := len(p.calls(""))
	for name, call := range map[string]func() error{
		"Confirm": func() error { _, err := s.UI().Confirm(ctx, "m"); return err },
		"Select":  func() error { _, _, err := s.UI().Select(ctx, "m", []string{"a"}); return err },
		"Input":   func() error { _, _, err := s.UI().Input(ctx, "m", nil); return err },
		"Elicit":  func() error { _, err := s.UI().Elicit(ctx, "m", map[string]any{}); return err },
	} {
		if err := call(); !errors.Is(err, ErrNotSupported) {
			t.Errorf("%s: got %v, want ErrNotSupported", name, err)
		}
	}
	if got := len(p.calls("")); got != before {
		t.Errorf("%d requests", got-before)
	}
	s.end(ErrClosed)
	if _, err := s.UI().Confirm(ctx, "m"); !errors.Is(err, ErrClosed) {
		t.Errorf("after the end: %v", err)
	}
}

func TestCase037PromptBytes(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	const prompt = "<a href=\"x\">&</a>\u2028\U0001F600 é\\u003c"
	if _, err := s.Send(testContext(t), Message{Prompt: prompt}); err != nil {
		t.Fatal(err)
	}
	if err := s.Log(testContext(t), prompt, nil); err != nil {
		t.Fatal(err)
	}
	for method, name := range map[string]string{"session.send": "prompt", "session.log": "message"} {
		m := p.wait(method, 1)
		if got := m.get(name); got != prompt {
			t.Errorf("%s: text is %q, want %q", method, got, prompt)
		}
		if !bytes.Contains(m.Params, []byte(`<a href=\"x\">&</a>`)) {
			t.Errorf("%s: escaped without need: %s", method, m.Params)
		}
	}
}

func TestCase038ResultNames(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	p.handle("status.get", func(p *peer, m peerMessage) any {
		p.send(map[string]any{"jsonrpc": "2.0", "id": m.ID, "Result": map[string]any{"version": "wrong"}}, // no response
			map[string]any{"jsonrpc": "2.0", "id": m.ID, "Result": map[string]any{"version": "wrong"}, "result": map[string]any{"version": "right"}})
		return noAnswer
	})
	if got, err := c.Status(testContext(t)); err != nil || got.Version != "right" {
		t.Errorf("got %+v, %v", got, err)
	}
	s := createSession(t, c, nil)
	sub := s.Subscribe()
	defer sub.Close()
	event := map[string]any{"id": "e", "type": "session.idle", "TYPE": "wrong", "data": map[string]any{}}
	p.send(map[string]any{"jsonrpc": "2.0", "method": "session.event", "METHOD": "wrong", "params": map[string]any{"sessionId": s.ID(), "sessionID": "wrong", "event": event}},
		map[string]any{"jsonrpc": "2.0", "method": "session.event", "params": map[string]any{"sessionID": s.ID(), "event": event}}, // of no session
		p.event(s.ID(), "last", nil))
	if e := next(t, sub); e.Type != EventSessionIdle {
		t.Errorf("first event is %s", e.Type)
	}
	if e := next(t, sub); e.Type != "last" {
		t.Errorf("second event is %s", e.Type)
	}
}

func TestCase040RequestIDs(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, &Options{Handlers: map[string]HandlerFunc{
		"test.echo": func(context.Context, string, json.RawMessage) (any, error) { return 1, nil },
	}})
	for _, method := range []string{"test.echo", "test.unknown"} {
		for _, id := range []string{`7`, `"7"`, `9007199254740993`, `-1`, `1.5`, `""`, `"é"`, `"\u00e9"`} {
			answer := make(chan peerMessage, 1)
			p.mu.Lock()
			p.answers[id] = answer
			p.mu.Unlock()
			body := fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"method":%q}`, id, method)
			p.raw(fmt.Appendf(nil, "Content-Length: %d\r\n\r\n%s", len(body), body))
			if got := await(t, "answer to "+id, answer); string(got.ID) != id {
				t.Errorf("%s: answered %s", id, got.ID)
			}
		}
	}
	// Responses that answer nothing disturb nobody.
	p.handle("ping", func(p *peer, m peerMessage) any {
		for _, id := range []any{nil, "1", -1, 1.5, 1 << 40, json.RawMessage(`"` + string(m.ID) + `"`), json.RawMessage(`1e0`), []any{}} {
			p.send(map[string]any{"jsonrpc": "2.0", "id": id, "result": map[string]any{"message": "wrong"}})
		}
		return map[string]any{"message": "right"}
	})
	if got, err := c.Ping(testContext(t), ""); err != nil || got.Message != "right" {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestCase058History(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	p.handle("session.getMessages", func(*peer, peerMessage) any {
		return json.RawMessage(`{"events":[
			{"id":"1","type":"future.thing","data":{"a":1.0}},
			7, null, "x", [],
			{"id":"2","type":"assistant.message","data":{"messageId":"m","content":"x","fromTheFuture":[1]}},
			{"id":"3","type":"assistant.message","data":{"content":7}},
			{"id":"4","type":"session.idle"},
			{"id":"5","type":"session.idle","data":null,"timestamp":"yesterday"}]}`)
	})
	events, err := s.History(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range events {
		kind := "typed"
		if raw, ok := e.Payload().(*RawPayload); ok {
			kind = fmt.Sprintf("raw %s, error %t", raw.Data, raw.Err != nil)
		}
		got = append(got, e.ID+" "+kind)
	}
	want := []string{`1 raw {"a":1.0}, error false`, "2 typed", `3 raw {"content":7}, error true`, "4 typed", "5 typed"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	p.handle("session.getMessages", func(*peer, peerMessage) any { return nil })
	if events, err := s.History(testContext(t)); err != nil || len(events) != 0 {
		t.Errorf("null: got %v, %v", events, err)
	}
}

func TestCase059OnceAndNotMixed(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	for _, streaming := range []bool{true, false} {
		s := createSession(t, c, &SessionConfig{Streaming: streaming})
		creates := p.calls("session.create")
		if got := creates[len(creates)-1].get("streaming"); got != streaming {
			t.Errorf("streaming is sent as %v, want %v", got, streaming)
		}
		sends := len(p.calls("session.send"))
		id := fmt.Sprint("m", sends+1)
		text := make(chan string, 1)
		turn := async(func() error {
			var streamed, final strings.Builder
			for e, err := range s.Ask(testContext(t), Message{Prompt: "x"}) {
				if err != nil {
					return err
				}
				if e.AgentID != "" {
					continue
				}
				switch d := e.Payload().(type) {
				case *AssistantMessageDelta:
					streamed.WriteString(d.DeltaContent)
				case *AssistantMessage:
					final.WriteString(d.Content)
				}
			}
			text <- streamed.String() + "|" + final.String()
			return nil
		})
		p.wait("session.send", sends+1)
		p.emit(s.ID(), "user.message", map[string]any{"messageId": id})
		delta := func(text string, extra ...any) {
			p.emit(s.ID(), "assistant.message_delta", map[string]any{"messageId": "a", "deltaContent": text}, append(extra, "ephemeral", true)...)
		}
		want := "|ab"
		if streaming {
			want = "ab|ab"
			delta("a")
			delta("sub", "agentId", "helper")
			delta("b")
		}
		p.emit(s.ID(), "assistant.message", map[string]any{"messageId": "s", "content": "sub"}, "agentId", "helper")
		p.emit(s.ID(), "assistant.message", map[string]any{"messageId": "a", "content": "ab"})
		p.emit(s.ID(), "assistant.message", map[string]any{"messageId": "s", "content": "sub"}, "agentId", "helper")
		p.emit(s.ID(), "session.idle", nil, "agentId", "helper") // not the turn's end
		p.emit(s.ID(), "session.idle", nil)
		if err := await(t, "turn", turn); err != nil {
			t.Fatal(err)
		}
		if got := <-text; got != want {
			t.Errorf("streaming %v: got %q, want %q", streaming, got, want)
		}
	}
}

func TestCase061IdleWithBackgroundWork(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	for i, tt := range []struct {
		tasks string // in the idle's data
		end   bool
	}{
		{``, true}, {`null`, true}, {`[]`, true}, {`{}`, true}, {`{"agents":[],"shells":[]}`, true}, {`"x"`, true},
		{`["x"]`, false}, {`[{"id":"1"}]`, false}, {`{"agents":[],"shells":[{"shellId":"1"}]}`, false},
	} {
		result := make(chan string, 1)
		turn := async(func() error {
			m, err := s.SendAndWait(testContext(t), Message{Prompt: "x"})
			if err == nil {
				result <- m.Content
			}
			return err
		})
		p.wait("session.send", i+1)
		p.sync() // the answer to the send has been seen
		idle := json.RawMessage(`{}`)
		if tt.tasks != "" {
			idle = json.RawMessage(`{"backgroundTasks":` + tt.tasks + `}`)
		}
		p.emit(s.ID(), "user.message", map[string]any{"messageId": fmt.Sprint("m", i+1)})
		p.emit(s.ID(), "assistant.message", map[string]any{"content": "first"})
		p.emit(s.ID(), "session.idle", idle)
		p.emit(s.ID(), "assistant.message", map[string]any{"content": "second"})
		p.emit(s.ID(), "session.idle", nil)
		if err := await(t, "turn", turn); err != nil {
			t.Fatal(err)
		}
		if got := <-result; (got == "first") != tt.end {
			t.Errorf("backgroundTasks %s: the turn ended with the %s message", tt.tasks, got)
		}
		p.sync()
	}
}

func TestCase062ErrorWithoutIdle(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	turn := async(func() error { _, err := s.SendAndWait(testContext(t), Message{}); return err })
	p.wait("session.send", 1)
	p.emit(s.ID(), "user.message", map[string]any{"messageId": "m1"})
	p.emit(s.ID(), "session.error", map[string]any{"errorType": "query", "message": "no", "statusCode": 400, "errorCode": "c", "url": "u"})
	err := await(t, "turn", turn)
	var failed *AgentError
	if !errors.As(err, &failed) || *failed != (AgentError{Type: "query", Message: "no", StatusCode: 400, Code: "c", URL: "u"}) {
		t.Errorf("got %#v", err)
	}

	s = createSession(t, c, nil)
	got := make(chan string, 1)
	turn = async(func() error {
		m, err := s.SendAndWait(testContext(t), Message{})
		if err == nil {
			got <- m.Content
		}
		return err
	})
	p.wait("session.send", 2)
	p.emit(s.ID(), "user.message", map[string]any{"messageId": "m2"})
	p.emit(s.ID(), "session.error", map[string]any{"errorType": "rate_limit", "message": "slow", "eligibleForAutoSwitch": true})
	p.emit(s.ID(), "assistant.message", map[string]any{"content": "after all"})
	p.emit(s.ID(), "session.idle", nil)
	if err := await(t, "turn", turn); err != nil {
		t.Fatal(err)
	}
	if m := <-got; m != "after all" {
		t.Errorf("got %q", m)
	}
}

// No clock of the library's runs while a turn is at work: the wait has no deadline, and the turn no timer that could end it.
func TestCase063NoHiddenLimit(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	turn := async(func() error { _, err := s.SendAndWait(context.Background(), Message{}); return err })
	p.wait("session.send", 1)
	p.emit(s.ID(), "user.message", map[string]any{"messageId": "m1"})
	at := time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)
	for hour := range 100 { // by the server's clock
		p.emit(s.ID(), "assistant.turn_start", nil, "timestamp", at.Add(time.Duration(hour)*time.Hour))
	}
	p.sync()
	s.mu.Lock()
	if running := s.turns.active; running == nil || running.backstop != nil {
		t.Errorf("the turn is %+v", running)
	}
	s.mu.Unlock()
	select {
	case err := <-turn:
		t.Fatalf("ended early: %v", err)
	default:
	}
	p.emit(s.ID(), "session.idle", nil)
	if err := await(t, "turn", turn); err != nil {
		t.Error(err)
	}
}

func TestCase069WhatWasSeen(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	for name, ask := range map[string]func(ctx context.Context) error{
		"SendAndWait": func(ctx context.Context) error { _, err := s.SendAndWait(ctx, Message{}); return err },
		"Ask": func(ctx context.Context) error {
			for _, err := range s.Ask(ctx, Message{}) {
				if err != nil {
					return err
				}
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := len(p.calls("session.send")) + 1
			stuck := errors.New("stuck")
			ctx, cancel := context.WithCancelCause(testContext(t))
			turn := async(func() error { return ask(ctx) })
			p.wait("session.send", n)
			p.emit(s.ID(), "user.message", map[string]any{"messageId": fmt.Sprint("m", n)})
			p.emit(s.ID(), "assistant.turn_start", nil)
			for _, tool := range []string{"bash", "view", "edit"} {
				p.emit(s.ID(), "tool.execution_start", map[string]any{"toolCallId": "c-" + tool, "toolName": tool})
			}
			p.emit(s.ID(), "tool.execution_complete", map[string]any{"toolCallId": "c-view", "success": false})
			p.emit(s.ID(), "permission.requested", map[string]any{"requestId": "r1"})
			p.emit(s.ID(), "permission.requested", map[string]any{"requestId": "r2"})
			p.emit(s.ID(), "permission.completed", map[string]any{"requestId": "r1"})
			p.emit(s.ID(), "assistant.turn_end", nil) // no end of the turn
			p.sync()
			select {
			case err := <-turn:
				t.Fatalf("ended: %v", err)
			default:
			}
			cancel(stuck)
			err := await(t, "turn", turn)
			var seen *TurnError
			if !errors.As(err, &seen) || !errors.Is(err, context.Canceled) || !errors.Is(err, stuck) {
				t.Fatalf("got %v", err)
			}
			if seen.LastEvent != "assistant.turn_end" || seen.LastEventAge < 0 || seen.Events != 10 || seen.OpenPermissions != 1 || !slices.Equal(seen.OpenTools, []string{"bash", "edit"}) {
				t.Errorf("got %+v", seen)
			}
			for _, part := range []string{"10 events", "assistant.turn_end", "bash, edit", "1"} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q lacks %q", err, part)
				}
			}
			p.emit(s.ID(), "session.idle", nil)
			p.sync()
		})
	}
	expired, cancel := context.WithDeadline(testContext(t), time.Unix(0, 0))
	defer cancel()
	if _, err := s.SendAndWait(expired, Message{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("deadline: %v", err)
	}
}

func TestCase089SecretsInTexts(t *testing.T) {
	leakCheck(t)
	const token, key, variable = "tok-123456789", "key-123456789", "env-123456789"
	var logged bytes.Buffer
	opts := &Options{
		ConnectionToken: token,
		Env:             []string{"MY_API_KEY=" + variable, "PATH=/bin"},
		Logger:          slog.New(slog.NewTextHandler(&logged, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	c, p := newPeer(t, opts)
	s := createSession(t, c, &SessionConfig{Provider: &ProviderConfig{Type: "openai", BaseURL: "http://127.0.0.1", APIKey: key}})
	hidden := []string{token, key, variable, s.ID()}
	words := strings.Join(hidden, " ")
	check := func(what, text string, list ...string) {
		t.Helper()
		for _, secret := range append(list, token, key, variable) {
			if strings.Contains(text, secret) {
				t.Errorf("%s shows %q: %s", what, secret, text)
			}
		}
	}
	p.refuse("status.get", -32603, words)
	_, err := c.Status(testContext(t))
	check("client call", err.Error(), hidden...)
	p.refuse("session.name.get", -32603, words)
	_, err = s.Name(testContext(t))
	check("session call", err.Error(), hidden...)
	var refused *RPCError
	if !errors.As(err, &refused) || refused.Message != words {
		t.Errorf("the server's words are %v", refused)
	}
	p.handle("session.setForeground", func(*peer, peerMessage) any { return map[string]any{"success": false, "error": words} })
	check("refusal", c.SetForegroundSessionID(testContext(t), s.ID()).Error(), hidden...)
	p.handle("session.mode.get", func(*peer, peerMessage) any { return []any{words} })
	_, err = s.Mode(testContext(t))
	check("misfit", err.Error(), hidden...)
	p.handle("session.getMessages", func(*peer, peerMessage) any { return map[string]any{"events": []any{7}} })
	if _, err := s.History(testContext(t)); err != nil {
		t.Error(err)
	}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		check(verb, fmt.Sprintf(verb, *opts), fmt.Sprintf("%x", token))
		check(verb, fmt.Sprintf(verb, opts), fmt.Sprintf("%x", token))
	}
	text, err := json.Marshal(opts)
	if err != nil {
		t.Error(err)
	}
	check("JSON", string(text))
	opts.Logger.Info("options", "opts", opts, "copy", *opts)
	c.ForceStop()
	await(t, "client's end", c.Done())
	_, err = s.Name(testContext(t))
	check("after the end", err.Error(), hidden...)
	check("log", logged.String(), s.ID())
	if !strings.Contains(logged.String(), redacted) {
		t.Errorf("the log does not show the options: %s", logged.String())
	}
}

// schemaResults are the results of the server's methods, in schemas, and the types that take them.
func schemaResults() map[string]any {
	return map[string]any{
		"ping":                             PingResult{},
		"models.list":                      map[string][]Model{"models": nil},
		"account.getQuota":                 Quota{},
		"sessions.list":                    map[string][]SessionInfo{"sessions": nil},
		"session.model.getCurrent":         CurrentModel{},
		"session.mode.get":                 AgentMode(""),
		"session.name.get":                 map[string]string{"name": ""},
		"session.plan.read":                Plan{},
		"session.workspaces.listFiles":     map[string][]string{"files": nil},
		"session.workspaces.readFile":      map[string]string{"content": ""},
		"session.fleet.start":              map[string]bool{"started": false},
		"session.history.compact":          Compaction{},
		"session.history.truncate":         map[string]int{"eventsRemoved": 0},
		"sessions.fork":                    map[string]string{"sessionId": ""},
		"session.log":                      map[string]string{"eventId": ""},
		"session.agent.list":               map[string][]AgentInfo{"agents": nil},
		"session.agent.getCurrent":         map[string]AgentInfo{"agent": {}},
		"session.skills.list":              map[string][]LoadedSkill{"skills": nil},
		"session.mcp.list":                 map[string][]LoadedMCPServer{"servers": nil},
		"session.tools.getCurrentMetadata": map[string][]ToolInfo{"tools": nil},
		"session.tasks.list":               map[string][]TaskInfo{"tasks": nil},
		"session.tasks.cancel":             map[string]bool{"cancelled": false},
		"session.queue.pendingItems":       Queue{},
		"session.usage.getMetrics":         Usage{},
		"session.permissions.getMode":      map[string]PermissionMode{"mode": ""},
		"session.permissions.setMode":      map[string]bool{"success": false},
		"session.canvas.listOpen":          map[string][]OpenCanvas{"openCanvases": nil},
		"session.abort":                    map[string]bool{"success": false},
	}
}

// resultDifferences lists where the results' types are not the schema's.
var resultDifferences = map[string]string{
	"account.getQuota.quotaSnapshots.*.hasQuota":           "the type is the event's, which has more",
	"account.getQuota.quotaSnapshots.*.overageEntitlement": "the type is the event's",
	"account.getQuota.quotaSnapshots.*.tokenBasedBilling":  "the type is the event's",
	"session.mcp.list.servers[].pluginName":                "the type is the event's; the list says sourcePlugin",
	"session.mcp.list.servers[].pluginVersion":             "the type is the event's",
	"session.mcp.list.servers[].transport":                 "the type is the event's",
	"sessions.list.sessions[].context.baseCommit":          "the type is the event's",
	"sessions.list.sessions[].context.headCommit":          "the type is the event's",
	"sessions.list.sessions[].context.pendingGitContext":   "the type is the event's",
	"sessions.list.sessions[].context.repositoryHost":      "the type is the event's",
	"sessions.list.sessions[].modifiedTime":                "called ISO 8601 in its description only",
	"sessions.list.sessions[].startTime":                   "called ISO 8601 in its description only",
}

func TestSchemaResults(t *testing.T) {
	dir := os.Getenv("COPILOT_SCHEMA_DIR")
	if dir == "" {
		t.Skip("skipped: COPILOT_SCHEMA_DIR is not set, so there is no schema to compare with")
	}
	text, err := os.ReadFile(filepath.Join(dir, "api.schema.json"))
	if err != nil {
		t.Fatal(err)
	}
	var schema schemaFile
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	methods := make(map[string]map[string]any)
	var collect func(node map[string]any)
	collect = func(node map[string]any) {
		if name, ok := node["rpcMethod"].(string); ok {
			methods[name] = node
			return
		}
		for _, child := range node {
			if child, ok := child.(map[string]any); ok {
				collect(child)
			}
		}
	}
	collect(schema["server"].(map[string]any))
	collect(schema["session"].(map[string]any))
	c := &conformance{t: t, schema: schema, listed: resultDifferences, used: make(map[string]bool)}
	for name, result := range schemaResults() {
		method := methods[name]
		if method == nil {
			t.Errorf("%s is not in the schema", name)
			continue
		}
		node := method["result"].(map[string]any)
		typ := reflect.TypeOf(result)
		if typ.Kind() != reflect.Map {
			c.check(name, typ, node)
			continue
		}
		member := reflect.ValueOf(result).MapKeys()[0].String() // stands for a struct with one member
		var found []any
		for _, alt := range schema.alternatives(node) {
			if p, ok := alt["properties"].(map[string]any)[member]; ok {
				found = append(found, p)
			}
		}
		if len(found) == 0 {
			t.Errorf("%s.%s is not in the schema", name, member)
			continue
		}
		c.check(name+"."+member, typ.Elem(), map[string]any{"anyOf": found})
	}
	c.finish()
	t.Logf("typed: results of %d of the schema's %d methods", len(schemaResults()), len(methods))
}

// TestRealHelpers runs the helpers against the real CLI.
func TestRealHelpers(t *testing.T) {
	c := startReal(t, Options{})
	model := newModelServer(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	dir := t.TempDir()
	config := &SessionConfig{Model: "fake-model", WorkingDirectory: dir,
		Provider:     &ProviderConfig{Type: "openai", WireAPI: "completions", BaseURL: model.URL + "/v1", APIKey: "dummy"},
		CustomAgents: []CustomAgent{{Name: "helper", Description: "helps", Prompt: "help"}}}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}

	if got, err := c.Ping(ctx, "hi"); err != nil || got.Message != "pong: hi" || got.Timestamp.IsZero() || got.ProtocolVersion != 3 {
		t.Errorf("ping: %+v, %v", got, err)
	}
	if got, err := c.Status(ctx); err != nil || got.Version != c.Server().Version || got.ProtocolVersion != 3 {
		t.Errorf("status: %+v, %v", got, err)
	}
	if got, err := c.AuthStatus(ctx); err != nil || got.IsAuthenticated || got.StatusMessage == "" {
		t.Errorf("auth: %+v, %v", got, err)
	}
	if _, err := c.Models(ctx); !errors.Is(err, ErrAuthentication) {
		t.Errorf("models: %v", err)
	}
	if _, err := c.Quota(ctx); !errors.Is(err, ErrAuthentication) {
		t.Errorf("quota: %v", err)
	}
	if list, err := c.Sessions(ctx, nil); err != nil || len(list) != 0 {
		t.Errorf("sessions: %+v, %v", list, err)
	}
	if id, err := c.LastSessionID(ctx); err != nil || id != "" {
		t.Errorf("last: %q, %v", id, err)
	}
	must(c.SendTelemetry(ctx, TelemetryEvent{Kind: "k", Properties: map[string]string{"p": "v"}, Metrics: map[string]float64{"m": 1}}))

	s, err := c.CreateSession(ctx, config)
	must(err)
	if s.WorkspacePath() == "" || s.Capabilities() != (Capabilities{}) || len(s.OpenCanvases()) != 0 {
		t.Errorf("session: %q, %+v, %v", s.WorkspacePath(), s.Capabilities(), s.OpenCanvases())
	}
	if m, err := s.SendAndWait(ctx, Message{Prompt: "say: hello"}); err != nil || m.Content != "hello" {
		t.Fatalf("turn: %+v, %v", m, err)
	}
	if got, err := s.Tools(ctx); err != nil || len(got) == 0 || got[0].Name == "" || len(got[0].InputSchema) == 0 {
		t.Errorf("tools: %d, %v", len(got), err)
	}

	// A log entry of level error, during a turn and stored or not, does not end it.
	for _, o := range []LogOptions{{Level: LogError}, {Level: LogError, Ephemeral: true}, {Level: LogWarning, Type: "t"}, {URL: "https://example.invalid/", Tip: "x"}} {
		sub := s.Subscribe()
		turn := async(func() error {
			m, err := s.SendAndWait(ctx, Message{Prompt: "hold: all is well"})
			if err == nil && m.Content != "all is well" {
				err = fmt.Errorf("got %q", m.Content)
			}
			return err
		})
		await(t, "held answer", model.Held)
		must(s.Log(ctx, "logged", &o))
		model.Release()
		if err := await(t, "turn", turn); err != nil {
			t.Errorf("%+v: %v", o, err)
		}
		found := false
		for !found {
			e := next(t, sub)
			found = string(member(e.Data, "message")) == `"logged"`
			if found && e.Ephemeral != o.Ephemeral {
				t.Errorf("%+v: event %+v", o, e)
			}
		}
		sub.Close()
		s.mu.Lock()
		if ts := &s.turns; ts.logging != 0 || len(ts.logged) != 0 || len(ts.recent) != 0 {
			t.Errorf("%+v: left behind: %+v", o, ts)
		}
		s.mu.Unlock()
	}

	if got, err := s.Model(ctx); err != nil || got.ModelID != "fake-model" {
		t.Errorf("model: %+v, %v", got, err)
	}
	must(s.SetModel(ctx, "other-model", &ModelOptions{ResetReasoningEffort: true}))
	if got, err := s.Model(ctx); err != nil || got.ModelID != "other-model" {
		t.Errorf("model: %+v, %v", got, err)
	}
	must(s.SetMode(ctx, AgentModePlan))
	if got, err := s.Mode(ctx); err != nil || got != AgentModePlan {
		t.Errorf("mode: %q, %v", got, err)
	}
	var refused *RPCError
	if err := s.SetMode(ctx, "sleepy"); !errors.As(err, &refused) {
		t.Errorf("unknown mode: %v", err)
	}
	must(s.SetMode(ctx, AgentModeInteractive))
	must(s.SetName(ctx, "my <name>"))
	if got, err := s.Name(ctx); err != nil || got != "my <name>" {
		t.Errorf("name: %q, %v", got, err)
	}
	if got, err := s.ReadPlan(ctx); err != nil || got.Exists || got.Path == "" {
		t.Errorf("plan: %+v, %v", got, err)
	}
	must(s.UpdatePlan(ctx, "# plan"))
	if got, err := s.ReadPlan(ctx); err != nil || !got.Exists || got.Content != "# plan" {
		t.Errorf("plan: %+v, %v", got, err)
	}
	must(s.DeletePlan(ctx))
	must(s.CreateWorkspaceFile(ctx, "notes/a.txt", "alpha"))
	if got, err := s.WorkspaceFiles(ctx); err != nil || !slices.Equal(got, []string{"notes/a.txt"}) {
		t.Errorf("files: %q, %v", got, err)
	}
	if got, err := s.ReadWorkspaceFile(ctx, "notes/a.txt"); err != nil || got != "alpha" {
		t.Errorf("file: %q, %v", got, err)
	}
	if _, err := s.ReadWorkspaceFile(ctx, "none"); !errors.As(err, &refused) {
		t.Errorf("no file: %v", err)
	}
	if got, err := s.Agents(ctx); err != nil || len(got) != 1 || got[0].Name != "helper" {
		t.Errorf("agents: %+v, %v", got, err)
	}
	if got, err := s.Agent(ctx); err != nil || got != nil {
		t.Errorf("agent: %+v, %v", got, err)
	}
	must(s.SelectAgent(ctx, "helper"))
	if got, err := s.Agent(ctx); err != nil || got == nil || got.Name != "helper" {
		t.Errorf("agent: %+v, %v", got, err)
	}
	must(s.SelectAgent(ctx, ""))
	if got, err := s.Skills(ctx); err != nil || len(got) == 0 || got[0].Name == "" {
		t.Errorf("skills: %+v, %v", got, err)
	}
	if got, err := s.MCPServers(ctx); err != nil || len(got) != 0 {
		t.Errorf("servers: %+v, %v", got, err)
	}
	if got, err := s.Tasks(ctx); err != nil || len(got) != 0 {
		t.Errorf("tasks: %+v, %v", got, err)
	}
	if got, err := s.CancelTask(ctx, "none"); err != nil || got {
		t.Errorf("cancel: %v, %v", got, err)
	}
	if got, err := s.Queue(ctx); err != nil || len(got.Items) != 0 {
		t.Errorf("queue: %+v, %v", got, err)
	}
	must(s.ClearQueue(ctx))
	if got, err := s.Usage(ctx); err != nil || got.TotalUserRequests != 5 || got.ModelMetrics["fake-model"].Requests.Count != 5 || got.SessionStartTime.IsZero() {
		t.Errorf("usage: %+v, %v", got, err)
	}
	must(s.SetPermissionMode(ctx, PermissionsAllowAll))
	if got, err := s.PermissionMode(ctx); err != nil || got != PermissionsAllowAll {
		t.Errorf("permission mode: %q, %v", got, err)
	}
	must(s.SendTelemetry(ctx, TelemetryEvent{Kind: "k"}))
	if _, err := s.UI().Confirm(ctx, "sure?"); !errors.Is(err, ErrNotSupported) {
		t.Errorf("confirm: %v", err)
	}
	if got, err := s.Compact(ctx); err != nil || !got.Success || got.SummaryContent == "" || got.ContextWindow == nil {
		t.Errorf("compact: %+v, %v", got, err)
	}

	history, err := s.History(ctx)
	must(err)
	var messages []string // ids of the user's messages
	for _, e := range history {
		if e.Type == EventUserMessage {
			messages = append(messages, e.ID)
		}
	}
	if len(messages) != 5 {
		t.Fatalf("%d messages in the history", len(messages))
	}
	fork, err := c.ForkSession(ctx, s.ID(), messages[2])
	if err != nil || fork == "" || fork == s.ID() {
		t.Fatalf("fork: %q, %v", fork, err)
	}
	if n, err := s.Truncate(ctx, messages[1]); err != nil || n == 0 {
		t.Errorf("truncate: %d, %v", n, err)
	}
	if again, err := s.History(ctx); err != nil || len(again) >= len(history) {
		t.Errorf("%d of %d events after truncate, %v", len(again), len(history), err)
	}
	must(s.StartFleet(ctx, "say: fleet"))

	resolved, err := filepath.EvalSymlinks(dir)
	must(err)
	if got, err := c.SessionInfo(ctx, s.ID()); err != nil || got == nil || got.SessionID != s.ID() || got.Name != "my <name>" || got.StartTime.IsZero() ||
		got.Context == nil || got.Context.CWD != dir && got.Context.CWD != resolved {
		t.Errorf("info: %+v, %v", got, err)
	}
	if list, err := c.Sessions(ctx, &SessionFilter{CWD: dir}); err != nil || !slices.ContainsFunc(list, func(i SessionInfo) bool { return i.SessionID == s.ID() }) {
		t.Errorf("sessions: %+v, %v", list, err)
	}
	if list, err := c.Sessions(ctx, &SessionFilter{CWD: filepath.Join(dir, "none")}); err != nil || len(list) != 0 {
		t.Errorf("sessions elsewhere: %+v, %v", list, err)
	}
	if id, err := c.LastSessionID(ctx); err != nil || id == "" {
		t.Errorf("last: %q, %v", id, err)
	}
	if id, err := c.ForegroundSessionID(ctx); err != nil || id != "" {
		t.Errorf("foreground: %q, %v", id, err)
	}
	if err := c.SetForegroundSessionID(ctx, s.ID()); !errors.As(err, &refused) || strings.Contains(err.Error(), s.ID()) {
		t.Errorf("set foreground: %v", err)
	}
	must(c.DeleteSession(ctx, s.ID()))
	await(t, "the session's end", s.Context().Done())
	if err := c.DeleteSession(ctx, s.ID()); !errors.Is(err, ErrSessionNotFound) || strings.Contains(err.Error(), s.ID()) {
		t.Errorf("delete again: %v", err)
	}
	must(c.DeleteSession(ctx, fork))
	if got, err := c.SessionInfo(ctx, s.ID()); err != nil || got != nil {
		t.Errorf("info of none: %+v, %v", got, err)
	}
}

// TestRealElicitation has a session that asks itself.
func TestRealElicitation(t *testing.T) {
	c := startReal(t, Options{})
	ctx := testContext(t)
	s := createSession(t, c, &SessionConfig{OnElicitation: func(ctx context.Context, _ ElicitationRequest) (ElicitationResult, error) {
		<-ctx.Done() // the test answers
		return ElicitationResult{}, ctx.Err()
	}})
	if !s.Capabilities().UI.Elicitation {
		t.Fatalf("capabilities are %+v", s.Capabilities())
	}
	sub := s.Subscribe()
	defer sub.Close()
	answer := func(result any) {
		t.Helper()
		e := next(t, sub)
		for ; e.Type != EventElicitationRequested; e = next(t, sub) {
		}
		if err := s.Call(ctx, "session.ui.handlePendingElicitation", map[string]any{"requestId": unquote(member(e.Data, "requestId")), "result": result}, nil); err != nil {
			t.Fatal(err)
		}
	}
	content := func(name string, value any) map[string]any {
		return map[string]any{"action": "accept", "content": map[string]any{name: value}}
	}
	for _, tt := range []struct {
		name   string
		result any
		ask    func() (any, bool, error)
		want   any
		ok     bool
	}{
		{"Confirm", content("confirmed", true), func() (any, bool, error) { yes, err := s.UI().Confirm(ctx, "sure?"); return yes, yes, err }, true, true},
		{"Select", content("selection", "b"), func() (any, bool, error) { return s.UI().Select(ctx, "which?", []string{"a", "b"}) }, "b", true},
		{"Input", content("value", "x"), func() (any, bool, error) { return s.UI().Input(ctx, "what?", &InputOptions{MaxLength: 3}) }, "x", true},
		{"declined", map[string]any{"action": "decline"}, func() (any, bool, error) { return s.UI().Input(ctx, "what?", nil) }, "", false},
	} {
		result := async(func() error {
			got, ok, err := tt.ask()
			if err == nil && (got != tt.want || ok != tt.ok) {
				err = fmt.Errorf("got %v, %v, want %v, %v", got, ok, tt.want, tt.ok)
			}
			return err
		})
		answer(tt.result)
		if err := await(t, tt.name, result); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

// inspectSource calls visit for the nodes of the package's files, tests excepted. What the tests read from the source
// cannot be forgotten in them.
func inspectSource(t testing.TB, visit func(ast.Node) bool) {
	t.Helper()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, visit)
	}
}

// eventConstants returns the names of the constants of type EventType.
func eventConstants(t testing.TB) map[EventType]string {
	t.Helper()
	names := make(map[EventType]string)
	inspectSource(t, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		if id, ok := spec.Type.(*ast.Ident); !ok || id.Name != "EventType" {
			return true
		}
		value, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
		if err != nil {
			t.Fatal(err)
		}
		if other := names[EventType(value)]; other != "" {
			t.Errorf("%s and %s are both %q", other, spec.Names[0].Name, value)
		}
		names[EventType(value)] = spec.Names[0].Name
		return true
	})
	if len(names) == 0 {
		t.Fatal("no constants of type EventType found")
	}
	return names
}

// typedEvents returns the event types that have a payload type, sorted.
func typedEvents(t testing.TB) []EventType {
	t.Helper()
	var types []EventType
	for typ := range eventConstants(t) {
		if newPayload(typ) != nil {
			types = append(types, typ)
		}
	}
	slices.Sort(types)
	return types
}

// goWords are the words that Go writes in a casing of their own, each before those it begins with.
var goWords = []string{"GitHub", "OAuth", "HTTP", "MIME", "BYOK", "TTFT", "WWW", "API", "MCP", "URL", "URI", "LLM", "AIU", "TTL",
	"CWD", "OID", "RTE", "AI", "ID", "UI"}

// wireSpelling turns the Go name of a field into the name it must have on the wire.
func wireSpelling(name string) string {
	var words []string
next:
	for name != "" {
		for _, w := range goWords {
			if strings.HasPrefix(name, w) {
				words, name = append(words, w), name[len(w):]
				continue next
			}
		}
		n := 1 + strings.IndexFunc(name[1:], unicode.IsUpper)
		if n == 0 {
			n = len(name)
		}
		words, name = append(words, name[:n]), name[n:]
	}
	for i, w := range words {
		words[i] = strings.ToLower(w)
		if i > 0 && unicode.IsUpper(rune(w[0])) {
			words[i] = strings.ToUpper(w[:1]) + words[i][1:]
		}
	}
	return strings.Join(words, "")
}

func TestEventNames(t *testing.T) {
	separator := regexp.MustCompile(`[._]`)
	for typ, name := range eventConstants(t) {
		var want strings.Builder
		for _, w := range separator.Split(string(typ), -1) {
			switch w {
			case "id", "url", "mcp", "ui", "api":
				w = strings.ToUpper(w)
			case "oauth":
				w = "OAuth"
			}
			want.WriteString(strings.ToUpper(w[:1]) + w[1:])
		}
		if name != "Event"+want.String() {
			t.Errorf("%q: constant is %s, want Event%s", typ, name, want.String())
		}
		p := newPayload(typ)
		if p == nil {
			continue
		}
		got := reflect.TypeOf(p).Elem().Name()
		// Three names belong to other types of the package.
		taken := typ == EventSessionError || typ == EventSessionInfo || typ == EventSystemMessage
		if got != want.String() && !(taken && got == want.String()+"Event") {
			t.Errorf("%q: payload type is %s, want %s", typ, got, want.String())
		}
	}
}

func TestEveryPayloadTypeHasAnEvent(t *testing.T) {
	made := map[string]bool{"RawPayload": true}
	for _, typ := range typedEvents(t) {
		made[reflect.TypeOf(newPayload(typ)).Elem().Name()] = true
	}
	inspectSource(t, func(n ast.Node) bool {
		if f, ok := n.(*ast.FuncDecl); ok && f.Recv != nil && f.Name.Name == "payload" {
			if name := f.Recv.List[0].Type.(*ast.StarExpr).X.(*ast.Ident).Name; !made[name] {
				t.Errorf("no event type gives a *%s", name)
			}
		}
		return true
	})
}

// filler fills values with data that occurs nowhere else in them.
type filler struct{ n int64 }

func (f *filler) fill(t *testing.T, v reflect.Value) {
	t.Helper()
	f.n++
	switch v.Interface().(type) {
	case time.Time:
		v.Set(reflect.ValueOf(time.Unix(1_800_000_000+f.n, 0).UTC()))
		return
	case json.RawMessage:
		v.SetBytes([]byte(fmt.Sprintf(`{"n":%d.0,"big":12345678901234567890}`, f.n)))
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(fmt.Sprintf("s%d", f.n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(f.n)
	case reflect.Float64:
		v.SetFloat(float64(f.n) + 0.5)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		f.fill(t, v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		f.fill(t, v.Index(0))
		f.fill(t, v.Index(1))
	case reflect.Map:
		elem := reflect.New(v.Type().Elem()).Elem()
		f.fill(t, elem)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(reflect.ValueOf(fmt.Sprintf("k%d", f.n)), elem)
	case reflect.Struct:
		for i := range v.NumField() {
			f.fill(t, v.Field(i))
		}
	default:
		t.Fatalf("no way to fill a %s", v.Type())
	}
}

// fields returns the JSON fields of a struct type, those of embedded structs among them, by wire name.
func fields(typ reflect.Type) map[string]reflect.StructField {
	byName := make(map[string]reflect.StructField)
	for _, f := range reflect.VisibleFields(typ) {
		if !f.Anonymous {
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			byName[name] = f
		}
	}
	return byName
}

// checkTags reports JSON names that are missing, double or not the field's.
func checkTags(t *testing.T, typ reflect.Type) {
	t.Helper()
	switch {
	case typ == reflect.TypeFor[time.Time]() || typ == reflect.TypeFor[json.RawMessage]():
	case typ.Kind() == reflect.Pointer || typ.Kind() == reflect.Slice || typ.Kind() == reflect.Map:
		checkTags(t, typ.Elem())
	case typ.Kind() == reflect.Struct:
		seen := make(map[string]string)
		for _, f := range reflect.VisibleFields(typ) {
			if f.Anonymous {
				continue
			}
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if want := wireSpelling(f.Name); name != want {
				t.Errorf("%s.%s: JSON name is %q, want %q", typ, f.Name, name, want)
			}
			if other, ok := seen[name]; ok {
				t.Errorf("%s: %s and %s share the JSON name %q", typ, other, f.Name, name)
			}
			seen[name] = f.Name
			checkTags(t, f.Type)
		}
	}
}

func TestPayloadRoundTrip(t *testing.T) {
	for _, typ := range typedEvents(t) {
		t.Run(string(typ), func(t *testing.T) {
			want := newPayload(typ)
			checkTags(t, reflect.TypeOf(want))
			new(filler).fill(t, reflect.ValueOf(want).Elem())
			data, err := json.Marshal(want)
			if err != nil {
				t.Fatal(err)
			}
			got := Event{Type: typ, Data: data}.Payload()
			if !reflect.DeepEqual(got, want) {
				t.Errorf("got  %+v\nwant %+v\ndata %s", got, want, data)
			}
		})
	}
}

// wantRaw checks that p is a raw payload with the error of a misfit and the data untouched.
func wantRaw(t *testing.T, p Payload, e Event) {
	t.Helper()
	raw, ok := p.(*RawPayload)
	if !ok {
		t.Fatalf("%s with data %s: payload is %T, want *RawPayload", e.Type, e.Data, p)
	}
	var misfit *DecodeError
	if !errors.As(raw.Err, &misfit) || misfit.Type != e.Type {
		t.Errorf("%s with data %s: error is %v, want a *DecodeError of that type", e.Type, e.Data, raw.Err)
	}
	if raw.Type != e.Type || !bytes.Equal(raw.Data, e.Data) {
		t.Errorf("raw payload is %s %s, want %s %s", raw.Type, raw.Data, e.Type, e.Data)
	}
}

func TestCase058OddPayloads(t *testing.T) {
	odd := []string{`"s"`, `-1`, `1.5`, `1e400`, `true`, `{}`, `[]`, `[{}]`, `{"x":[]}`, `[null]`}
	for _, typ := range typedEvents(t) {
		t.Run(string(typ), func(t *testing.T) {
			full := newPayload(typ)
			new(filler).fill(t, reflect.ValueOf(full).Elem())
			data, err := json.Marshal(full)
			if err != nil {
				t.Fatal(err)
			}
			before, after := Event{Type: typ, Data: data}, Event{Type: typ, Data: data}
			decode := func(data string) (Event, Payload) {
				t.Helper()
				e := Event{Type: typ, Data: json.RawMessage(data)}
				first, p, last := before.Payload(), e.Payload(), after.Payload()
				if string(e.Data) != data {
					t.Fatalf("data %s was changed to %s", data, e.Data)
				}
				if !reflect.DeepEqual(first, full) || !reflect.DeepEqual(last, full) {
					t.Fatalf("data %s disturbed its neighbours", data)
				}
				return e, p
			}

			for _, data := range []string{"", "null", "{}", `{"fromTheFuture":{"a":[1]}}`} {
				if _, p := decode(data); !reflect.DeepEqual(p, newPayload(typ)) {
					t.Errorf("data %q: payload is %#v, want an empty one", data, p)
				}
			}
			for _, data := range []string{`"s"`, `7`, `true`, `[]`, `{`, `{"a":}`, `nul`} {
				e, p := decode(data)
				wantRaw(t, p, e)
			}
			for name, f := range fields(reflect.TypeOf(full).Elem()) {
				if _, p := decode(fmt.Sprintf(`{%q:null}`, name)); reflect.TypeOf(p) != reflect.TypeOf(full) {
					t.Errorf("%s null: payload is %#v", name, p)
				}
				misfits := 0
				for _, v := range odd {
					e, p := decode(fmt.Sprintf(`{%q:%s}`, name, v))
					if reflect.TypeOf(p) != reflect.TypeOf(full) {
						wantRaw(t, p, e)
						misfits++
					}
				}
				if f.Type != reflect.TypeFor[json.RawMessage]() && misfits == 0 {
					t.Errorf("%s took every one of %q", name, odd)
				}
			}
		})
	}
}

func TestPayloadUnknownType(t *testing.T) {
	for _, typ := range []EventType{"", "future.thing", EventPendingMessagesModified} {
		e := Event{Type: typ, Data: json.RawMessage(`{"a":1.0}`)}
		want := &RawPayload{Type: typ, Data: e.Data}
		if got := e.Payload(); !reflect.DeepEqual(got, want) {
			t.Errorf("%q: payload is %#v, want %#v", typ, got, want)
		}
	}
}

func TestPayloadKeepsDigits(t *testing.T) {
	const args = `{"id": 12345678901234567890, "limit":128000.0, "text":"<&>\u00e9"}`
	e := Event{Type: EventToolExecutionStart, Data: json.RawMessage(`{"toolCallId":"c","toolName":"t","arguments":` + args + `}`)}
	p, ok := e.Payload().(*ToolExecutionStart)
	if !ok || string(p.Arguments) != args {
		t.Errorf("payload is %#v, want arguments %s", e.Payload(), args)
	}
}

func TestEventDecode(t *testing.T) {
	type mode struct{ Mode string }
	tests := []struct {
		name, data string
		want       mode
	}{
		{"object", `{"mode":"plan","content":"x"}`, mode{"plan"}},
		{"absent", ``, mode{}},
		{"null", `null`, mode{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got *mode // null must not leave it nil
			err := Event{Type: EventSessionModeNoticeDelivered, Data: json.RawMessage(tt.data)}.Decode(&got)
			if err != nil || got == nil || *got != tt.want {
				t.Errorf("got %+v, error %v; want %+v", got, err, tt.want)
			}
		})
	}

	bad := Event{Type: EventSessionModeNoticeDelivered, Data: json.RawMessage(`{"mode":1}`)}
	var kind *json.UnmarshalTypeError
	if err := bad.Decode(new(mode)); !errors.As(err, &kind) {
		t.Errorf("number for a string: error is %v, want a *json.UnmarshalTypeError", err)
	}
	for _, v := range []any{nil, mode{}, (*mode)(nil)} {
		var misfit *DecodeError
		if err := bad.Decode(v); !errors.As(err, &misfit) {
			t.Errorf("into %#v: error is %v, want a *DecodeError", v, err)
		}
	}
}

func TestDecodeErrorIsShort(t *testing.T) {
	long := strings.Repeat("9é", 1<<18)
	for _, data := range []string{`{"startTime":"` + long + `"}`, `{"version":` + strings.Repeat("9", 1<<18) + `}`} {
		raw, ok := Event{Type: EventSessionStart, Data: json.RawMessage(data)}.Payload().(*RawPayload)
		if !ok || raw.Err == nil {
			t.Fatalf("%.40s... fits", data)
		}
		if n := len(raw.Err.Error()); n > 512 {
			t.Errorf("the error for %.40s... is %d bytes long", data, n)
		}
	}
	err := Event{Type: EventType(long), Data: json.RawMessage(`1`)}.Decode(&struct{}{})
	if n := len(err.Error()); n > 512 {
		t.Errorf("the error for a long type is %d bytes long", n)
	}
}

func FuzzPayload(f *testing.F) {
	for typ := range eventConstants(f) {
		data := []byte(`{"content":"x","requestId":1,"arguments":{"a":1.0},"startTime":"2026-01-02T03:04:05.678Z"}`)
		if p := newPayload(typ); p != nil {
			data, _ = json.Marshal(p)
		}
		f.Add(string(typ), data)
	}
	for _, raw := range recordedKinds(f) {
		var m message
		if m.parse(raw) && m.event != nil {
			f.Add(unquote(m.fields.typ), bytes.Clone(m.fields.data))
		}
	}
	f.Fuzz(func(t *testing.T, typ string, data []byte) {
		e := Event{Type: EventType(typ), Data: bytes.Clone(data)}
		p := e.Payload()
		if !bytes.Equal(e.Data, data) {
			t.Fatal("the data was changed")
		}
		if raw, ok := p.(*RawPayload); ok {
			if raw.Type != e.Type || !bytes.Equal(raw.Data, data) {
				t.Fatalf("raw payload is %#v", raw)
			}
			if (raw.Err != nil) != (newPayload(e.Type) != nil) {
				t.Fatalf("error is %v", raw.Err)
			}
			return
		}
		// What was decoded can be encoded, and from then on it stays the same. (The first time, spelling is lost.)
		again := func(p Payload) Payload {
			data, err := json.Marshal(p)
			if err != nil {
				t.Fatal(err)
			}
			return Event{Type: e.Type, Data: data}.Payload()
		}
		second := again(p)
		if third := again(second); !reflect.DeepEqual(second, third) {
			t.Fatalf("got %+v, want %+v", third, second)
		}
	})
}

// transcriptLine is one recorded message.
type transcriptLine struct {
	File string          `json:"file"` // the recording, without extension
	Dir  string          `json:"dir"`  // c2s or s2c
	Conn json.RawMessage `json:"conn"` // which connection, in recordings with several
	Msg  json.RawMessage `json:"msg"`
}

// readTranscripts returns the recorded traffic of CLI 1.0.102, in order, file by file. Long strings in it are cut.
func readTranscripts(t testing.TB) []transcriptLine {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", "transcripts.jsonl.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var lines []transcriptLine
	for d := json.NewDecoder(bufio.NewReader(z)); ; {
		var line transcriptLine
		switch err := d.Decode(&line); err {
		case nil:
			lines = append(lines, line)
		case io.EOF:
			return lines
		default:
			t.Fatal(err)
		}
	}
}

func TestReplayTranscripts(t *testing.T) {
	type wireEvent struct {
		ID   string          `json:"id"`
		Type EventType       `json:"type"`
		Data json.RawMessage `json:"data"`
	}
	constants := eventConstants(t)
	files, events, typed := make(map[string]bool), 0, make(map[EventType]int)
	for _, line := range readTranscripts(t) {
		files[line.File] = true
		var msg struct {
			Method string
			Params struct{ Event *wireEvent }
			Result struct{ Events []wireEvent }
		}
		// Results of other calls may have another shape; events are all that matters here.
		if err := json.Unmarshal(line.Msg, &msg); err != nil && msg.Method == "session.event" {
			t.Errorf("%s: %v", line.File, err)
		}
		found := msg.Result.Events
		if msg.Method == "session.event" {
			if msg.Params.Event == nil {
				t.Fatalf("%s: session.event without event: %.200s", line.File, line.Msg)
			}
			found = append(found, *msg.Params.Event)
		}
		for _, w := range found {
			events++
			if constants[w.Type] == "" {
				t.Errorf("%s: no constant for event type %q", line.File, w.Type)
			}
			switch p := (Event{ID: w.ID, Type: w.Type, Data: w.Data}).Payload().(type) {
			case *RawPayload:
				if p.Err != nil {
					t.Errorf("%s: event %s: %v", line.File, w.ID, p.Err)
				}
			default:
				typed[w.Type]++
			}
		}
	}
	if len(files) < 60 || events < 5000 || len(typed) < 50 {
		t.Errorf("only %d recordings, %d events, %d types with payload type: where is the rest?", len(files), events, len(typed))
	}
	t.Logf("%d events of %d recordings; %d payload types seen", events, len(files), len(typed))
}

// liveOnly lists members that CLI 1.0.102 was seen to send and its published schema (of 1.0.89-7) lacks.
var liveOnly = map[string]string{
	"session.start.githubMcpToolConfig.disableFormDeferral": "a member of the type that session.create takes",
	"session.error.originatingMessageId":                    "tells whose run failed; needed to end the right turn",
	"session.compaction_start.compactionAttemptId":          "ties the end to its start",
	"session.compaction_complete.compactionAttemptId":       "ties the end to its start",
	"session.compaction_complete.outcome":                   "finer than success",
	"session.mcp_server_status_changed.configSource":        "where the server was configured",
	"assistant.usage.modelDisplayName":                      "for display",
	"assistant.usage.providerType":                          "tells BYOK providers apart",
	"model.call_failure.retryAttempt":                       "counts the tries",
	"tool.execution_complete.fileEdits":                     "which files a tool wrote",
	"permission.requested.ownerSessionId":                   "whose permission it is, with sub-sessions",
	"elicitation.requested.elicitationId":                   "identifies a url elicitation to its MCP server",
	"exit_plan_mode.requested.toolCallId":                   "the tool call that waits",
	"mcp.oauth_required.runtimeRefreshSupported":            "whether the runtime renews tokens by itself",
	"sampling.requested.request":                            "the request itself, which the schema forgot",
}

// schemaFile is a JSON schema with its definitions.
type schemaFile map[string]any

// alternatives follows references and unions to the plain schemas that a value may match; null is none of them.
func (s schemaFile) alternatives(node map[string]any) []map[string]any {
	if ref, ok := node["$ref"].(string); ok {
		name := strings.TrimPrefix(ref, "#/definitions/")
		return s.alternatives(s["definitions"].(map[string]any)[name].(map[string]any))
	}
	for _, union := range []string{"anyOf", "oneOf", "allOf"} {
		if list, ok := node[union].([]any); ok {
			var all []map[string]any
			for _, alt := range list {
				all = append(all, s.alternatives(alt.(map[string]any))...)
			}
			return all
		}
	}
	if node["type"] == "null" {
		return nil
	}
	return []map[string]any{node}
}

// schemaKinds returns the JSON types of a plain schema but null; none means any.
func schemaKinds(node map[string]any) []string {
	var kinds []string
	switch typ := node["type"].(type) {
	case string:
		kinds = append(kinds, typ)
	case []any:
		for _, k := range typ {
			if k != "null" {
				kinds = append(kinds, k.(string))
			}
		}
	}
	return kinds
}

// conformance compares Go types with a schema.
type conformance struct {
	t      *testing.T
	schema schemaFile
	listed map[string]string // known differences, with the reason
	used   map[string]bool   // those that were met
}

// differs reports whether a difference is listed.
func (c *conformance) differs(at string) bool {
	c.used[at] = true
	return c.listed[at] != ""
}

// finish reports differences that are listed without need.
func (c *conformance) finish() {
	for at := range c.listed {
		if !c.used[at] {
			c.t.Errorf("%s is listed as different from the schema, and is not", at)
		}
	}
}

// check reports where typ cannot take what node describes. path is the wire name of the value.
func (c *conformance) check(path string, typ reflect.Type, node map[string]any) {
	if typ == reflect.TypeFor[json.RawMessage]() {
		return
	}
	if typ.Kind() == reflect.Pointer {
		typ = typ.Elem()
	}
	want, kind := "", typ.Kind()
	switch {
	case typ == reflect.TypeFor[time.Time](), kind == reflect.String:
		want = "string"
	case kind == reflect.Bool:
		want = "boolean"
	case kind == reflect.Int, kind == reflect.Int64:
		want = "integer"
	case kind == reflect.Float64:
		want = "number"
	case kind == reflect.Slice:
		want = "array"
	case kind == reflect.Map, kind == reflect.Struct:
		want = "object"
	default:
		c.t.Errorf("%s: what is a %s on the wire?", path, typ)
		return
	}
	alternatives := c.schema.alternatives(node)
	if len(alternatives) == 0 {
		c.t.Errorf("%s: the schema allows only null", path)
	}
	for _, alt := range alternatives {
		kinds := schemaKinds(alt)
		for _, k := range kinds {
			if k != want && !(k == "integer" && want == "number") {
				c.t.Errorf("%s: %s cannot take a %s", path, typ, k)
			}
		}
		if len(kinds) == 0 {
			c.t.Errorf("%s: %s cannot take any value", path, typ)
		}
		if typ == reflect.TypeFor[time.Time]() && alt["format"] != "date-time" && !c.differs(path) {
			c.t.Errorf("%s: format is %v, want date-time", path, alt["format"])
		}
		if kind == reflect.Slice {
			c.check(path+"[]", typ.Elem(), alt["items"].(map[string]any))
		}
		if kind == reflect.Map {
			c.check(path+".*", typ.Elem(), alt["additionalProperties"].(map[string]any))
		}
	}
	if want != "object" || kind == reflect.Map {
		return
	}
	for name, f := range fields(typ) {
		var found []any // one struct may serve several alternatives, and so may the structs in it
		for _, alt := range alternatives {
			properties, _ := alt["properties"].(map[string]any)
			if p, ok := properties[name]; ok {
				found = append(found, p)
			}
		}
		at := path + "." + name
		switch {
		case len(found) > 0:
			c.check(at, f.Type, map[string]any{"anyOf": found})
		case !c.differs(at):
			c.t.Errorf("%s: not in the schema", at)
		}
	}
}

func TestSchemaConformance(t *testing.T) {
	dir := os.Getenv("COPILOT_SCHEMA_DIR")
	if dir == "" {
		t.Skip("skipped: COPILOT_SCHEMA_DIR is not set, so there is no schema to compare with")
	}
	text, err := os.ReadFile(filepath.Join(dir, "session-events.schema.json"))
	if err != nil {
		t.Fatal(err)
	}
	var schema schemaFile
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	constants := eventConstants(t)
	c := &conformance{t: t, schema: schema, listed: liveOnly, used: make(map[string]bool)}
	types, typed := make(map[EventType]bool), 0
	for _, event := range schema.alternatives(schema) {
		properties := event["properties"].(map[string]any)
		typ := EventType(properties["type"].(map[string]any)["const"].(string))
		types[typ] = true
		if constants[typ] == "" {
			t.Errorf("no constant for %q", typ)
		}
		if p := newPayload(typ); p != nil {
			typed++
			c.check(string(typ), reflect.TypeOf(p), properties["data"].(map[string]any))
		}
	}
	var unlisted []string
	for typ := range constants {
		if !types[typ] {
			unlisted = append(unlisted, string(typ))
			if newPayload(typ) != nil {
				t.Errorf("%q has a payload type, but is not in the schema", typ)
			}
		}
	}
	c.finish()
	slices.Sort(unlisted)
	t.Logf("typed: %d of the schema's %d event types (%d%%)", typed, len(types), 100*typed/len(types))
	t.Logf("constants for %d types that are not in the schema: %s", len(unlisted), strings.Join(unlisted, ", "))
}

// mapFS is a SessionFS in memory.
type mapFS struct {
	mu    sync.Mutex
	files fstest.MapFS
}

func newMapFS() *mapFS { return &mapFS{files: make(fstest.MapFS)} }

func hostKey(name string) string {
	if key := strings.Trim(path.Clean(name), "/"); key != "" {
		return key
	}
	return "."
}

func (m *mapFS) put(name string, data []byte, perm fs.FileMode) {
	m.files[hostKey(name)] = &fstest.MapFile{Data: data, Mode: perm}
}

func (m *mapFS) ReadFile(ctx context.Context, name string) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.files.ReadFile(hostKey(name))
}

func (m *mapFS) WriteFile(ctx context.Context, name string, data []byte, perm fs.FileMode) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.put(name, data, perm)
	return nil
}

func (m *mapFS) AppendFile(ctx context.Context, name string, data []byte, perm fs.FileMode) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	old, _ := m.files.ReadFile(hostKey(name))
	m.put(name, append(old, data...), perm)
	return nil
}

func (m *mapFS) Stat(ctx context.Context, name string) (fs.FileInfo, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.files.Stat(hostKey(name))
}

func (m *mapFS) ReadDir(ctx context.Context, name string) ([]fs.DirEntry, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.files.ReadDir(hostKey(name))
}

func (m *mapFS) Mkdir(ctx context.Context, name string, perm fs.FileMode) error {
	if _, err := m.Stat(ctx, name); err == nil {
		return &fs.PathError{Op: "mkdir", Path: name, Err: fs.ErrExist}
	}
	return m.MkdirAll(ctx, name, perm)
}

func (m *mapFS) MkdirAll(ctx context.Context, name string, perm fs.FileMode) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.put(name, nil, perm|fs.ModeDir)
	return nil
}

func (m *mapFS) Remove(ctx context.Context, name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.files[hostKey(name)] == nil {
		return &fs.PathError{Op: "remove", Path: name, Err: fs.ErrNotExist}
	}
	delete(m.files, hostKey(name))
	return nil
}

func (m *mapFS) RemoveAll(ctx context.Context, name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for key := range m.files {
		if key == hostKey(name) || strings.HasPrefix(key, hostKey(name)+"/") {
			delete(m.files, key)
		}
	}
	return nil
}

func (m *mapFS) Rename(ctx context.Context, oldName, newName string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	f := m.files[hostKey(oldName)]
	if f == nil {
		return &fs.PathError{Op: "rename", Path: oldName, Err: fs.ErrNotExist}
	}
	m.files[hostKey(newName)] = f
	delete(m.files, hostKey(oldName))
	return nil
}

// serveInMemory is a RoundTripper that calls the handler: no connection, no port. The response streams.
type serveInMemory struct{ http.Handler }

func (s serveInMemory) RoundTrip(req *http.Request) (*http.Response, error) {
	body, w := io.Pipe()
	rec := &memoryWriter{header: make(http.Header), body: w, begun: make(chan int, 1)}
	go func() { // ends with the handler, which the request's context ends
		defer func() {
			var err error
			if p := recover(); p != nil {
				err = fmt.Errorf("handler: %v", p)
			}
			rec.WriteHeader(http.StatusOK)
			w.CloseWithError(err)
		}()
		s.ServeHTTP(rec, req)
	}()
	context.AfterFunc(req.Context(), func() { w.CloseWithError(req.Context().Err()) })
	select {
	case status := <-rec.begun:
		return &http.Response{StatusCode: status, Header: rec.header, Body: body, Request: req}, nil
	case <-req.Context().Done():
		return nil, req.Context().Err()
	}
}

type memoryWriter struct {
	header http.Header
	body   io.Writer
	begun  chan int
	once   sync.Once
}

func (w *memoryWriter) Header() http.Header { return w.header }
func (w *memoryWriter) WriteHeader(status int) {
	w.once.Do(func() {
		w.begun <- status
	})
}
func (w *memoryWriter) Write(p []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	return w.body.Write(p)
}
func (w *memoryWriter) Flush() {}

type roundTripper func(req *http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

func hostProvider(m *modelServer) *ProviderConfig {
	return &ProviderConfig{Type: "openai", WireAPI: "completions", BaseURL: m.URL + "/v1", APIKey: "dummy"}
}

func TestRealSessionFS(t *testing.T) {
	model := newModelServer(t)
	c := startReal(t, Options{SessionFS: &SessionFSConfig{InitialCWD: "/workspace", StatePath: "/state", Conventions: "posix"}})
	ctx := testContext(t)
	for name, files := range map[string]SessionFS{"map": newMapFS(), "directory": DirFS(t.TempDir())} {
		cfg := &SessionConfig{Model: "fake-model", Provider: hostProvider(model), SessionFS: files}
		s := createSession(t, c, cfg)
		for range 3 {
			if m, err := s.SendAndWait(ctx, Message{Prompt: "say: kept by the host"}); err != nil || m.Content != "kept by the host" {
				t.Fatalf("%s: turn: %v %v", name, m, err)
			}
		}
		if err := s.Disconnect(ctx); err != nil {
			t.Fatal(err)
		}
		log, err := files.ReadFile(ctx, "/state/events.jsonl")
		if err != nil || strings.Count(string(log), "kept by the host") < 6 {
			t.Errorf("%s: the conversation is not there: %v\n%s", name, err, log)
		}
		s, err = c.ResumeSession(ctx, s.ID(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		if m, err := s.SendAndWait(ctx, Message{Prompt: "history"}); err != nil || !strings.Contains(m.Content, "kept by the host") {
			t.Errorf("%s: resumed: %v %v", name, m, err)
		}
	}
}

func TestRealModelTransport(t *testing.T) {
	model := newModel()
	model.URL = "http://nowhere.invalid"
	var mu sync.Mutex
	var infos []ModelRequest
	cancelled := make(chan struct{}, 16)
	var aborting atomic.Bool
	transport := roundTripper(func(req *http.Request) (*http.Response, error) {
		info, _ := ModelRequestFrom(req.Context())
		mu.Lock()
		infos = append(infos, info)
		mu.Unlock()
		context.AfterFunc(req.Context(), func() {
			if aborting.Load() {
				cancelled <- struct{}{} // by the runtime's word, or since it wanted no more of the response
			}
		})
		return serveInMemory{model}.RoundTrip(req)
	})
	c := startReal(t, Options{ModelTransport: transport})
	ctx := testContext(t)
	for _, streaming := range []bool{true, false} {
		s := createSession(t, c, &SessionConfig{Model: "fake-model", Streaming: streaming, Provider: hostProvider(model), WorkingDirectory: t.TempDir()})
		if m, err := s.SendAndWait(ctx, Message{Prompt: "say: through a function"}); err != nil || m.Content != "through a function" {
			t.Fatalf("turn: %v %v", m, err)
		}
		var agent *AgentError
		if _, err := s.SendAndWait(ctx, Message{Prompt: "status: 400"}); !errors.As(err, &agent) {
			t.Errorf("a refusal: %v", err)
		}
		mu.Lock()
		if len(infos) == 0 || infos[0].SessionID != s.ID() {
			t.Errorf("requests made for %+v, want the session", infos)
		}
		infos = nil
		mu.Unlock()
	}
	// A turn that is aborted cancels its request.
	s := createSession(t, c, &SessionConfig{Model: "fake-model", Streaming: true, Provider: hostProvider(model), WorkingDirectory: t.TempDir()})
	turn := async(func() error { _, err := s.SendAndWait(ctx, Message{Prompt: "hold: one two"}); return err })
	await(t, "model", model.Held)
	aborting.Store(true)
	if err := s.Abort(ctx); err != nil {
		t.Fatal(err)
	}
	if err := await(t, "turn", turn); !errors.Is(err, ErrAborted) {
		t.Error(err)
	}
	await(t, "cancellation of the model request", cancelled)
}

func TestRealBearerToken(t *testing.T) {
	model := newModelServer(t)
	c := startReal(t, Options{})
	provider := hostProvider(model)
	provider.APIKey = ""
	n := 0
	provider.BearerTokenProvider = func(ctx context.Context, name string) (string, error) {
		n++ // one request at a time
		return fmt.Sprintf("token-%d-%s", n, name), nil
	}
	s := createSession(t, c, &SessionConfig{Model: "fake-model", Provider: provider, WorkingDirectory: t.TempDir()})
	for range 2 {
		if m, err := s.SendAndWait(testContext(t), Message{Prompt: "say: hello"}); err != nil || m.Content != "hello" {
			t.Fatalf("turn: %v %v", m, err)
		}
	}
	var got []string
	for _, r := range model.Requests() {
		got = append(got, r.Header.Get("Authorization"))
	}
	if want := []string{"Bearer token-1-default", "Bearer token-2-default"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// hostAnswer asks the client and returns its answer as JSON, an error as "code message data".
func hostAnswer(p *peer, method, params string) string {
	p.t.Helper()
	return hostText(p.request(method, json.RawMessage(params)))
}

func hostText(m peerMessage) string {
	if m.Error != nil {
		return strings.TrimSpace(fmt.Sprintf("%d %s %s", m.Error.Code, m.Error.Message, m.Error.Data))
	}
	return string(m.Result)
}

// hostShort leaves out what the system or package json says in an answer.
func hostShort(answer string) string {
	answer = regexp.MustCompile(`("message":"[a-z]+ [^:"]*): [^"]*"`).ReplaceAllString(answer, `$1"`)
	return regexp.MustCompile(`^(-32602 params): json: .*`).ReplaceAllString(answer, "$1")
}

func TestHostingSetUp(t *testing.T) {
	leakCheck(t)
	opts := &Options{
		SessionFS:      &SessionFSConfig{InitialCWD: "/workspace", StatePath: "/state", Conventions: "posix", SQLite: true},
		ModelTransport: serveInMemory{newModel()},
	}
	_, p := newPeer(t, opts)
	var got []string
	for _, m := range p.calls("") {
		got = append(got, m.Method+" "+string(m.Params))
	}
	want := []string{
		`connect {}`,
		`sessionFs.setProvider {"initialCwd":"/workspace","sessionStatePath":"/state","conventions":"posix","capabilities":{"sqlite":true}}`,
		`llmInference.setProvider {}`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	for _, method := range []string{"sessionFs.setProvider", "llmInference.setProvider"} {
		near, far := net.Pipe()
		p := startPeer(t, far)
		p.handle(method, func(*peer, peerMessage) any { return map[string]bool{"success": false} })
		if c, err := NewClient(testContext(t), near, opts); err == nil || !strings.Contains(err.Error(), method) {
			t.Errorf("%s declined: %v %v", method, c, err)
		}
	}
}

func TestSessionFSRefusedEarly(t *testing.T) {
	leakCheck(t)
	declared := func(change func(*SessionFSConfig)) *SessionFSConfig {
		f := &SessionFSConfig{InitialCWD: "/w", StatePath: "/s"}
		change(f)
		return f
	}
	for _, tt := range []struct {
		name   string
		opts   *SessionFSConfig
		cfg    SessionConfig
		client bool // whether the client's options are at fault
	}{
		{name: "no working directory", opts: declared(func(f *SessionFSConfig) { f.InitialCWD = "" }), client: true},
		{name: "no state path", opts: declared(func(f *SessionFSConfig) { f.StatePath = "" }), client: true},
		{name: "unknown conventions", opts: declared(func(f *SessionFSConfig) { f.Conventions = "vms" }), client: true},
		{name: "no files", opts: declared(func(f *SessionFSConfig) {})},
		{name: "nil from New", opts: declared(func(f *SessionFSConfig) { f.New = func(string) SessionFS { return nil } })},
		{name: "no SQLite", opts: declared(func(f *SessionFSConfig) { f.SQLite = true }), cfg: SessionConfig{SessionFS: newMapFS()}},
		{name: "not declared", cfg: SessionConfig{SessionFS: newMapFS()}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			near, far := net.Pipe()
			p := startPeer(t, far)
			c, err := NewClient(testContext(t), near, &Options{SessionFS: tt.opts})
			if tt.client {
				if !errors.Is(err, ErrInvalidConfig) || len(p.calls("")) > 0 {
					t.Errorf("got %v after %v", err, p.calls(""))
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer c.ForceStop()
			if _, err := c.CreateSession(testContext(t), &tt.cfg); !errors.Is(err, ErrInvalidConfig) || len(p.calls("session.create")) > 0 {
				t.Errorf("got %v", err)
			}
		})
	}
	// A function of the options serves the sessions that bring nothing.
	files := newMapFS()
	c, p := newPeer(t, &Options{SessionFS: declared(func(f *SessionFSConfig) {
		f.New = func(id string) SessionFS { files.put("/made-for", []byte(id), 0o600); return files }
	})})
	s := createSession(t, c, nil)
	if got, want := hostAnswer(p, "sessionFs.readFile", `{"sessionId":"`+s.ID()+`","path":"/made-for"}`), `{"content":"`+s.ID()+`"}`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// sqlFS answers SQL as its functions do.
type sqlFS struct {
	*mapFS
	query func(SQLStatement) (SQLResult, error)
}

func (s sqlFS) Query(ctx context.Context, q SQLStatement) (SQLResult, error) { return s.query(q) }
func (s sqlFS) DatabaseExists(ctx context.Context) (bool, error)             { return true, nil }
func (s sqlFS) Transaction(ctx context.Context, qs []SQLStatement) (results []SQLResult, err error) {
	for _, q := range qs {
		r, err := s.query(q)
		if err != nil {
			return nil, &SQLTransactionError{Class: "busyOrLocked", Err: err}
		}
		results = append(results, r)
	}
	return results, nil
}

func TestSessionFSGolden(t *testing.T) {
	leakCheck(t)
	dir := t.TempDir()
	c, p := newPeer(t, &Options{SessionFS: &SessionFSConfig{InitialCWD: "/", StatePath: "/state"}})
	s := createSession(t, c, &SessionConfig{SessionID: "s", SessionFS: DirFS(dir)})
	when := time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.UTC)
	for _, tt := range []struct{ method, params, want string }{
		{"readFile", `{"path":"/state/none"}`, `{"content":"","error":{"code":"ENOENT","message":"read /state/none"}}`},
		{"mkdir", `{"path":"/a/b","mode":448}`, `{"code":"ENOENT","message":"mkdir /a/b"}`},
		{"mkdir", `{"path":"/a/b/c","recursive":true,"mode":448}`, `null`},
		{"mkdir", `{"path":"/a/b/c","recursive":true}`, `null`},
		{"mkdir", `{"path":"/a/b/c"}`, `{"code":"UNKNOWN","message":"mkdir /a/b/c"}`},
		{"writeFile", `{"path":"/a/f","content":"one\u00e9\n","mode":384}`, `null`},
		{"appendFile", `{"path":"/a/f","content":"two"}`, `null`},
		{"appendFile", `{"path":"/new/deep/f","content":"x"}`, `null`},
		{"readFile", `{"path":"/a/f"}`, `{"content":"oneé\ntwo"}`},
		{"readFile", `{"path":"/a"}`, `{"content":"","error":{"code":"UNKNOWN","message":"read /a"}}`},
		{"exists", `{"path":"/a/f"}`, `{"exists":true}`},
		{"exists", `{"path":"/a/g"}`, `{"exists":false}`},
		{"exists", `{"path":"/../x"}`, `{"exists":false}`},
		{"stat", `{"path":"/a/f"}`, `{"isFile":true,"isDirectory":false,"size":9,"mtime":"2026-01-02T03:04:05.678Z","birthtime":"2026-01-02T03:04:05.678Z"}`},
		{"stat", `{"path":"/a/g"}`, `{"isFile":false,"isDirectory":false,"size":0,"mtime":"1970-01-01T00:00:00Z","birthtime":"1970-01-01T00:00:00Z","error":{"code":"ENOENT","message":"stat /a/g"}}`},
		{"readdir", `{"path":"/a"}`, `{"entries":["b","f"]}`},
		{"readdirWithTypes", `{"path":"/a"}`, `{"entries":[{"name":"b","type":"directory"},{"name":"f","type":"file"}]}`},
		{"readdir", `{"path":"/a/b/c"}`, `{"entries":[]}`},
		{"readdirWithTypes", `{"path":"/g"}`, `{"entries":[],"error":{"code":"ENOENT","message":"readdir /g"}}`},
		{"rename", `{"src":"/a/f","dest":"/a/h"}`, `null`},
		{"rename", `{"src":"/a/f","dest":"/a/h"}`, `{"code":"ENOENT","message":"rename /a/f to /a/h"}`},
		{"rm", `{"path":"/a/f"}`, `{"code":"ENOENT","message":"remove /a/f"}`},
		{"rm", `{"path":"/a/f","force":true}`, `null`},
		{"rm", `{"path":"/g","recursive":true}`, `{"code":"ENOENT","message":"stat /g"}`},
		{"rm", `{"path":"/g","recursive":true,"force":true}`, `null`},
		{"rm", `{"path":"/a/b","recursive":true}`, `null`},
		{"readdir", `{"path":"/a"}`, `{"entries":["h"]}`},

		{"readFile", `{}`, `-32602 params: path is missing`},
		{"rename", `{"src":"/a/h"}`, `-32602 params: src or dest is missing`},
		{"mkdir", `{"path":"/m","mode":-1}`, `-32602 params`},
		{"sqliteExists", `{}`, `-32603 this session has no SQLite`},
		{"watch", `{"path":"/a"}`, `-32601 method not found: sessionFs.watch`},
		{"readFile", `{"sessionId":"t","path":"/a/h"}`, `-32602 no such session here`},
	} {
		params := strings.Replace(tt.params, "{", `{"sessionId":"s",`, 1)
		if strings.Contains(tt.params, "sessionId") {
			params = tt.params
		}
		if got := hostShort(hostAnswer(p, "sessionFs."+tt.method, strings.Replace(params, ",}", "}", 1))); got != tt.want {
			t.Errorf("%s %s\ngot  %s\nwant %s", tt.method, tt.params, got, tt.want)
		}
		if tt.method == "appendFile" {
			if err := os.Chtimes(filepath.Join(dir, "a", "f"), when, when); err != nil {
				t.Fatal(err)
			}
		}
	}
	if runtime.GOOS != "windows" {
		if info, err := os.Stat(filepath.Join(dir, "a", "h")); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("the server's mode: %v %v", info.Mode(), err)
		}
	}
	if err := s.Disconnect(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if got := hostAnswer(p, "sessionFs.readFile", `{"sessionId":"s","path":"/a/h"}`); !strings.HasPrefix(got, "-32602") {
		t.Errorf("after the end: %s", got)
	}
}

func TestSessionSQLiteGolden(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, &Options{SessionFS: &SessionFSConfig{InitialCWD: "/", StatePath: "/state", SQLite: true}})
	id := int64(7)
	db := sqlFS{newMapFS(), func(q SQLStatement) (SQLResult, error) {
		switch q.Query {
		case "bad":
			return SQLResult{}, errors.New("near bad")
		case "types":
			return SQLResult{Columns: []string{"go"}, Rows: []map[string]any{{"go": fmt.Sprintf("%T %T %T", q.Params["i"], q.Params["f"], q.Params["s"])}}}, nil
		case "panic":
			panic("no")
		}
		return SQLResult{RowsAffected: 1, LastInsertRowID: &id}, nil
	}}
	createSession(t, c, &SessionConfig{SessionID: "s", SessionFS: db})
	for _, tt := range []struct{ method, params, want string }{
		{"sqliteExists", `{"sessionId":"s"}`, `{"exists":true}`},
		{"sqliteQuery", `{"sessionId":"s","query":"insert","queryType":"run"}`, `{"rows":[],"columns":[],"rowsAffected":1,"lastInsertRowid":7}`},
		{"sqliteQuery", `{"sessionId":"s","query":"types","queryType":"query","params":{"i":3,"f":1.5,"s":"x"}}`, `{"rows":[{"go":"int64 float64 string"}],"columns":["go"],"rowsAffected":0}`},
		{"sqliteQuery", `{"sessionId":"s","query":"bad","queryType":"exec"}`, `{"rows":[],"columns":[],"rowsAffected":0,"error":{"code":"UNKNOWN","message":"near bad"}}`},
		{"sqliteQuery", `{"sessionId":"s","query":"panic","queryType":"exec"}`, `-32603 the host's handler panicked`},
		{"sqliteQuery", `{"sessionId":"s","query":1}`, `-32602 params`},
		{"sqliteTransaction", `{"sessionId":"s","statements":[{"query":"insert","queryType":"run"}]}`, `{"results":[{"rows":[],"columns":[],"rowsAffected":1,"lastInsertRowid":7}]}`},
		{"sqliteTransaction", `{"sessionId":"s","statements":[{"query":"bad","queryType":"run"}]}`, `{"results":[],"error":{"errorClass":"busyOrLocked","message":"near bad"}}`},
	} {
		if got := hostShort(hostAnswer(p, "sessionFs."+tt.method, tt.params)); got != tt.want {
			t.Errorf("%s %s\ngot  %s\nwant %s", tt.method, tt.params, got, tt.want)
		}
	}
}

// blockingFS holds a write until it may end, and says what has become of its context then.
type blockingFS struct {
	*mapFS
	begun, end chan struct{}
}

func (b blockingFS) AppendFile(ctx context.Context, name string, data []byte, perm fs.FileMode) error {
	b.begun <- struct{}{}
	select {
	case <-b.end:
		return ctx.Err()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// The server writes the rest of the conversation while it lets go of a session.
func TestSessionFSWritesDuringRelease(t *testing.T) {
	leakCheck(t)
	files := blockingFS{newMapFS(), make(chan struct{}), make(chan struct{})}
	c, p := newPeer(t, &Options{SessionFS: &SessionFSConfig{InitialCWD: "/", StatePath: "/state"}})
	s := createSession(t, c, &SessionConfig{SessionID: "s", SessionFS: files})
	p.handle("session.destroy", func(*peer, peerMessage) any { return noAnswer })
	const params = `{"sessionId":"s","path":"/state/events.jsonl","content":"x"}`
	before := p.ask("sessionFs.appendFile", json.RawMessage(params))
	await(t, "the write before", files.begun)
	left := async(func() error { return s.Disconnect(testContext(t)) })
	destroy := p.wait("session.destroy", 1)
	during := p.ask("sessionFs.appendFile", json.RawMessage(params))
	await(t, "the write during the release", files.begun)
	close(files.end)
	for _, answer := range []<-chan peerMessage{before, during} {
		if got := hostText(await(t, "answer", answer)); got != "null" {
			t.Errorf("got %s", got)
		}
	}
	p.answer(destroy.ID, map[string]any{"success": true})
	if err := await(t, "disconnect", left); err != nil {
		t.Error(err)
	}
}

// A handler that never comes back is told that the session has ended.
func TestSessionFSEnds(t *testing.T) {
	leakCheck(t)
	files := blockingFS{newMapFS(), make(chan struct{}), nil}
	c, p := newPeer(t, &Options{SessionFS: &SessionFSConfig{InitialCWD: "/", StatePath: "/state"}})
	s := createSession(t, c, &SessionConfig{SessionID: "s", SessionFS: files})
	answer := p.ask("sessionFs.appendFile", json.RawMessage(`{"sessionId":"s","path":"/f","content":"x"}`))
	await(t, "the write", files.begun)
	if err := s.Disconnect(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if got, want := hostText(await(t, "answer", answer)), `{"code":"UNKNOWN","message":"copilot: closed"}`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestDirFSConfined(t *testing.T) {
	ctx := testContext(t)
	top := t.TempDir()
	dir, secret := filepath.Join(top, "dir"), filepath.Join(top, "secret")
	for _, d := range []string{filepath.Join(dir, "in"), filepath.Join(top, "out")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(secret, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	names := []string{"/../secret", "../secret", "in/../../secret", "/in/../../secret", "a\x00b"}
	links := map[string]string{"file": secret, "dir": top, "back": filepath.Join("..", "secret"), "inside": filepath.Join(dir, "in"), "dangling": filepath.Join(top, "made")}
	for name, to := range links {
		if err := os.Symlink(to, filepath.Join(dir, "in", name)); err != nil {
			t.Skipf("no links here: %v", err)
		}
		names = append(names, "/in/"+name, "/in/"+name+"/secret")
	}
	files := DirFS(dir)
	for _, name := range names {
		if data, err := files.ReadFile(ctx, name); err == nil {
			t.Errorf("read %q: %q", name, data)
		} else if strings.Contains(err.Error(), top) {
			t.Errorf("read %q: shows our path: %v", name, err)
		}
		if err := files.WriteFile(ctx, name, []byte("x"), 0o600); err == nil {
			t.Errorf("wrote %q", name)
		}
		if err := files.AppendFile(ctx, name, []byte("x"), 0o600); err == nil {
			t.Errorf("appended to %q", name)
		}
		if _, err := files.Stat(ctx, name); err == nil {
			t.Errorf("stat %q", name)
		}
		if _, err := files.ReadDir(ctx, name); err == nil {
			t.Errorf("listed %q", name)
		}
		if err := files.MkdirAll(ctx, name+"/new", 0o700); err == nil {
			t.Errorf("made a directory below %q", name)
		}
		if err := files.Rename(ctx, "/in", name+"/moved"); err == nil {
			t.Fatalf("moved below %q", name)
		}
		if err := files.RemoveAll(ctx, name+"/secret"); err == nil && !strings.HasPrefix(name, "/in/") {
			t.Errorf("removed below %q", name)
		}
	}
	if _, err := files.ReadFile(ctx, "/in/dir/secret"); !errors.Is(err, errLink) {
		t.Errorf("below a link: %v", err)
	}
	if _, err := files.Stat(ctx, ""); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("no name: %v", err)
	}
	for _, name := range []string{"/", ".", "/in/.."} {
		if files.RemoveAll(ctx, name) == nil || files.Remove(ctx, name) == nil || files.Rename(ctx, name, "/x") == nil {
			t.Errorf("the directory itself can be removed as %q", name)
		}
		if info, err := files.Stat(ctx, name); err != nil || !info.IsDir() {
			t.Errorf("stat %q: %v %v", name, info, err)
		}
	}
	for name := range links { // links themselves may go
		if err := files.Remove(ctx, "/in/"+name); err != nil {
			t.Error(err)
		}
	}
	if data, err := os.ReadFile(secret); err != nil || string(data) != "secret" {
		t.Errorf("outside: %q %v", data, err)
	}
	if entries, _ := os.ReadDir(top); len(entries) != 3 {
		t.Errorf("outside: %v", entries)
	}
	if err := files.WriteFile(ctx, `C:\state\f`, []byte("x"), 0o600); err != nil {
		t.Error(err)
	}
	if data, err := os.ReadFile(filepath.Join(dir, "C", "state", "f")); err != nil || string(data) != "x" {
		t.Errorf("a path with a drive: %q %v", data, err)
	}
	if _, err := files.ReadFile(ctx, `C:\..\..\secret`); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("a path with a drive: %v", err)
	}
}

func TestDirFSBadFiles(t *testing.T) {
	ctx := testContext(t)
	dir := t.TempDir()
	big, err := os.Create(filepath.Join(dir, "big"))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(big.Truncate(maxSessionFile+1), big.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := DirFS(dir).ReadFile(ctx, "/big"); err == nil || !strings.Contains(err.Error(), "larger than") {
		t.Errorf("a huge file: %v", err)
	}
	if mkfifo, err := exec.LookPath("mkfifo"); err == nil {
		if err := exec.Command(mkfifo, filepath.Join(dir, "pipe")).Run(); err != nil {
			t.Fatal(err)
		}
		_, readErr := DirFS(dir).ReadFile(ctx, "/pipe") // would wait for a writer
		writeErr := DirFS(dir).WriteFile(ctx, "/pipe", nil, 0o600)
		if readErr == nil || writeErr == nil {
			t.Errorf("a named pipe: %v, %v", readErr, writeErr)
		}
	}
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := DirFS(dir).ReadDir(cancelled, "/"); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestProviderToken(t *testing.T) {
	leakCheck(t)
	const token = "tok-3cr3t"
	logs := new(hdlLog)
	c, p := newPeer(t, &Options{Logger: slog.New(slog.NewTextHandler(logs, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	provide := func(ctx context.Context, provider string) (string, error) {
		switch provider {
		case "fails":
			return token, fmt.Errorf("exchange of %s and static-key: denied", token)
		case "empty":
			return "", nil
		case "line":
			return token + "\n", nil
		case "panics":
			panic("at the bank")
		case "blocks":
			<-ctx.Done()
			return "", context.Cause(ctx)
		}
		return token + provider, nil
	}
	cfg := &SessionConfig{SessionID: "s"}
	for _, name := range []string{"acme", "fails", "empty", "line", "panics", "blocks"} {
		cfg.Providers = append(cfg.Providers, NamedProviderConfig{Name: name, BaseURL: "http://x", BearerTokenProvider: provide})
	}
	cfg.Providers = append(cfg.Providers, NamedProviderConfig{Name: "static", BaseURL: "http://x", APIKey: "static-key"})
	s := createSession(t, c, cfg)
	createSession(t, c, &SessionConfig{SessionID: "d", Provider: &ProviderConfig{BaseURL: "http://x", BearerTokenProvider: provide}})
	const bad = "-32603 token provider: it returned no token, or one with blanks or control characters"
	for _, tt := range []struct{ session, provider, want string }{
		{"s", "acme", `{"token":"tok-3cr3tacme"}`},
		{"d", "default", `{"token":"tok-3cr3tdefault"}`},
		{"s", "default", `-32603 no token provider for "default"`},
		{"s", "static", `-32603 no token provider for "static"`},
		{"s", "fails", `-32603 token provider: exchange of [redacted] and [redacted]: denied`},
		{"s", "empty", bad},
		{"s", "line", bad},
		{"s", "panics", `-32603 the host's handler panicked`},
		{"gone", "acme", `-32602 no such session here`},
	} {
		params := fmt.Sprintf(`{"sessionId":%q,"providerName":%q}`, tt.session, tt.provider)
		if got := hostAnswer(p, "providerToken.getToken", params); got != tt.want {
			t.Errorf("%s\ngot  %s\nwant %s", params, got, tt.want)
		}
	}
	if got := hostAnswer(p, "providerToken.getToken", `{"sessionId":"s","providerName":1}`); !strings.HasPrefix(got, "-32602 params") {
		t.Errorf("got %s", got)
	}
	blocked := p.ask("providerToken.getToken", json.RawMessage(`{"sessionId":"s","providerName":"blocks"}`))
	p.sync()
	if err := s.Disconnect(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if got := hostText(await(t, "answer", blocked)); !strings.HasPrefix(got, "-32603 token provider: ") {
		t.Errorf("got %s", got)
	}
	if strings.Contains(logs.String(), token) {
		t.Errorf("the log shows the token:\n%s", logs)
	}
}

func TestGitHubToken(t *testing.T) {
	leakCheck(t)
	const token = "gho-3cr3t"
	c, p := newPeer(t, nil)
	var early string // the answer that came before the session's
	p.handle("session.create", func(p *peer, m peerMessage) any {
		id := m.get("gitHubTokenProviderRegistrationId")
		if id == nil {
			return map[string]any{"sessionId": m.get("sessionId")}
		}
		answer := p.ask("gitHubToken.getToken", map[string]any{"registrationId": id, "host": "github.com", "reason": "initial"})
		go func() { // ends with the client's answer; the peer has to read it
			early = hostText(<-answer)
			p.answer(m.ID, map[string]any{"sessionId": m.get("sessionId")})
		}()
		return noAnswer
	})
	var mu sync.Mutex
	var asked []GitHubTokenRequest
	result := &GitHubAccessToken{AccessToken: token, TokenType: "bearer", ExpiresIn: 8 * time.Hour}
	var fail error
	s := createSession(t, c, &SessionConfig{SessionID: "s", GitHubTokenProvider: func(ctx context.Context, r GitHubTokenRequest) (*GitHubAccessToken, error) {
		mu.Lock()
		defer mu.Unlock()
		asked = append(asked, r)
		return result, fail
	}})
	const good = `{"kind":"token","accessToken":"gho-3cr3t","tokenType":"bearer","expiresIn":28800}`
	if early != good {
		t.Errorf("during the start: %s", early)
	}
	registration, _ := p.wait("session.create", 1).get("gitHubTokenProviderRegistrationId").(string)
	if len(registration) != 36 {
		t.Errorf("registration %q", registration)
	}
	for _, tt := range []struct {
		name   string
		result *GitHubAccessToken
		err    error
		want   string
	}{
		{"again", result, nil, good},
		{"cancelled", nil, nil, `{"kind":"cancelled"}`},
		{"error", result, errors.New("no " + token), "-32603 GitHub token provider: no [redacted]"},
		{"no lifetime", &GitHubAccessToken{AccessToken: token}, nil, "-32603 GitHub token provider: ExpiresIn is less than a second"},
		{"no token", &GitHubAccessToken{ExpiresIn: time.Hour}, nil, "-32603 GitHub token provider: it returned no token, or one with blanks or control characters"},
	} {
		mu.Lock()
		result, fail = tt.result, tt.err
		mu.Unlock()
		params := fmt.Sprintf(`{"registrationId":%q,"host":"ghe.example","sessionId":"s","reason":"refresh"}`, registration)
		if got := hostAnswer(p, "gitHubToken.getToken", params); got != tt.want {
			t.Errorf("%s\ngot  %s\nwant %s", tt.name, got, tt.want)
		}
	}
	if want := []GitHubTokenRequest{{Host: "github.com", Reason: "initial"}, {"ghe.example", "s", "refresh"}}; !slices.Equal(asked[:2], want) {
		t.Errorf("asked %+v, want %+v", asked[:2], want)
	}
	const unknown = "-32601 no GitHub token provider has this registration"
	if got := hostAnswer(p, "gitHubToken.getToken", `{"registrationId":"other","host":"h","reason":"initial"}`); got != unknown {
		t.Errorf("got %s", got)
	}
	if err := s.Disconnect(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if got := hostAnswer(p, "gitHubToken.getToken", fmt.Sprintf(`{"registrationId":%q}`, registration)); got != unknown {
		t.Errorf("after the end: %s", got)
	}
	_, err := c.PrepareSession(&SessionConfig{GitHubToken: token, GitHubTokenProvider: func(context.Context, GitHubTokenRequest) (*GitHubAccessToken, error) { return nil, nil }})
	if !errors.Is(err, ErrInvalidConfig) {
		t.Errorf("both tokens: %v", err)
	}
	if text := fmt.Sprintf("%v %+v %#v %s", GitHubAccessToken{AccessToken: token}, &GitHubAccessToken{AccessToken: token}, GitHubAccessToken{AccessToken: token}, GitHubAccessToken{AccessToken: token}); strings.Contains(text, token) {
		t.Errorf("printing shows the token: %s", text)
	}
}

func TestCanvas(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	var got CanvasCall
	closed := false
	cfg := &SessionConfig{SessionID: "s", Canvases: []CanvasDeclaration{
		{ID: "board", DisplayName: "Board", Description: "d",
			Open: func(ctx context.Context, call CanvasCall) (CanvasView, error) {
				got = call
				if string(call.Input) == `"refuse"` {
					return CanvasView{}, fmt.Errorf("inner: %w", &CanvasError{"too_many", "three are open"})
				}
				return CanvasView{URL: "http://x/board", Title: "B"}, nil
			},
			Close: func(ctx context.Context, call CanvasCall) error { closed = true; return nil },
			Actions: []CanvasAction{
				{Name: "echo", Handler: func(ctx context.Context, call CanvasCall) (any, error) { return call.Input, nil }},
				{Name: "fail", Handler: func(ctx context.Context, call CanvasCall) (any, error) { return nil, errors.New("no ink") }},
				{Name: "panic", Handler: func(ctx context.Context, call CanvasCall) (any, error) { panic("ink") }},
				{Name: "declared"},
			}},
		{ID: "bare", DisplayName: "Bare", Description: "d"},
	}}
	createSession(t, c, cfg)
	if want := `[{"id":"board","displayName":"Board","description":"d","actions":[{"name":"echo"},{"name":"fail"},{"name":"panic"},{"name":"declared"}]},{"id":"bare","displayName":"Bare","description":"d"}]`; string(member(p.wait("session.create", 1).Params, "canvases")) != want {
		t.Errorf("declared %s", p.wait("session.create", 1).Params)
	}
	for _, tt := range []struct{ method, params, want string }{
		{"open", `"canvasId":"board","input":{"n":1},"host":{"capabilities":{"canvases":true}},"session":{"workingDirectory":"/w"}`, `{"url":"http://x/board","title":"B"}`},
		{"open", `"canvasId":"board","input":"refuse"`, `-32603 three are open {"code":"too_many","message":"three are open"}`},
		{"open", `"canvasId":"bare"`, `-32603 no handler for canvas "bare" {"code":"canvas_handler_unset","message":"no handler for canvas \"bare\""}`},
		{"close", `"canvasId":"board"`, `null`},
		{"close", `"canvasId":"other"`, `-32603 no handler for canvas "other" {"code":"canvas_handler_unset","message":"no handler for canvas \"other\""}`},
		{"action.invoke", `"canvasId":"board","actionName":"echo","input":[1.50]`, `[1.50]`},
		{"action.invoke", `"canvasId":"board","actionName":"fail"`, `-32603 no ink {"code":"canvas_handler_error","message":"no ink"}`},
		{"action.invoke", `"canvasId":"board","actionName":"panic"`, `-32603 the host's handler panicked {"code":"canvas_handler_error","message":"the host's handler panicked"}`},
		{"action.invoke", `"canvasId":"board","actionName":"declared"`, `-32603 no handler for action "declared" {"code":"canvas_action_no_handler","message":"no handler for action \"declared\""}`},
		{"action.invoke", `"canvasId":[]`, `-32602 params`},
		{"other", `"canvasId":"board"`, `-32601 method not found: canvas.other`},
	} {
		params := `{"sessionId":"s","extensionId":"e","instanceId":"i",` + tt.params + `}`
		if got := hostShort(hostAnswer(p, "canvas."+tt.method, params)); got != tt.want {
			t.Errorf("%s %s\ngot  %s\nwant %s", tt.method, tt.params, got, tt.want)
		}
		if tt.want == `{"url":"http://x/board","title":"B"}` {
			if got.SessionID != "s" || got.ExtensionID != "e" || got.CanvasID != "board" || got.InstanceID != "i" || string(got.Input) != `{"n":1}` ||
				got.WorkingDirectory != "/w" || got.CanvasesShown == nil || !*got.CanvasesShown {
				t.Errorf("opened with %+v", got)
			}
		}
	}
	if !closed {
		t.Error("not closed")
	}
}

// modelPeer plays the runtime's side of model requests.
type modelPeer struct {
	*peer
	frames chan string // the client's response, a line for each request
	accept func(peerMessage) bool
}

func newModelPeer(t *testing.T, transport http.RoundTripper) (*Client, *modelPeer) {
	logs := new(hdlLog)
	t.Cleanup(func() {
		if strings.Contains(logs.String(), "3cr3t") {
			t.Errorf("the log shows a secret:\n%s", logs)
		}
	})
	c, p := newPeer(t, &Options{ModelTransport: transport, Logger: slog.New(slog.NewTextHandler(logs, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	m := &modelPeer{peer: p, frames: make(chan string, 1<<12), accept: func(peerMessage) bool { return true }}
	take := func(p *peer, msg peerMessage) any {
		var chunk struct {
			RequestID  string
			Status     int
			StatusText string
			Headers    json.RawMessage
			Data       *[]byte
			Binary     bool
			End        bool
			Error      json.RawMessage
		}
		if err := json.Unmarshal(msg.Params, &chunk); err != nil {
			t.Error(err)
		}
		line := chunk.RequestID + " "
		if chunk.Data == nil {
			line += fmt.Sprintf("%d %s %s", chunk.Status, chunk.StatusText, chunk.Headers)
		} else {
			line += fmt.Sprintf("%s binary=%v end=%v %s", *chunk.Data, chunk.Binary, chunk.End, chunk.Error)
		}
		accepted := m.accept(msg)
		m.frames <- strings.TrimSpace(line)
		return map[string]bool{"accepted": accepted}
	}
	p.handle("llmInference.httpResponseStart", take)
	p.handle("llmInference.httpResponseChunk", take)
	return c, m
}

func (m *modelPeer) begin(params string) {
	m.t.Helper()
	if got := hostAnswer(m.peer, "llmInference.httpRequestStart", params); got != "{}" {
		m.t.Errorf("start answered %s", got)
	}
}

func (m *modelPeer) chunk(params string) {
	m.t.Helper()
	if got := hostAnswer(m.peer, "llmInference.httpRequestChunk", params); got != "{}" {
		m.t.Errorf("chunk answered %s", got)
	}
}

func (m *modelPeer) expect(lines ...string) {
	m.t.Helper()
	for _, want := range lines {
		if got := await(m.t, want, m.frames); got != want {
			m.t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

const modelStart = `{"requestId":"r","method":"POST","url":"http://model.invalid/v1/x","headers":{}}`

func TestModelTransportRequest(t *testing.T) {
	leakCheck(t)
	type seen struct {
		method, url, header, body string
		length                    int64
		info                      ModelRequest
	}
	requests := make(chan seen, 1)
	_, p := newModelPeer(t, roundTripper(func(req *http.Request) (*http.Response, error) {
		body, err := io.ReadAll(req.Body)
		if err != nil {
			return nil, err
		}
		header, _ := json.Marshal(req.Header)
		info, _ := ModelRequestFrom(req.Context())
		requests <- seen{req.Method, req.URL.String(), string(header), string(body), req.ContentLength, info}
		return &http.Response{StatusCode: 201, Header: http.Header{"X-Id": {"1", "2"}, "Transfer-Encoding": {"chunked"}}, Body: io.NopCloser(strings.NewReader("ok"))}, nil
	}))
	for i, tt := range []struct {
		name, start string
		chunks      []string
		want        seen
	}{
		{"one piece",
			`{"requestId":"r","sessionId":"s","agentId":"a","parentAgentId":"p","agentInvocationId":"i","interactionType":"t","method":"POST","url":"http://m.invalid/x?q=1",
			"headers":{"authorization":["Bearer k"],"accept":["a","b"],"host":["h"],"content-length":["9"],"connection":["x-hop, close"],"x-hop":["1"],"te":["t"],"sec-websocket-key":["k"]}}`,
			[]string{`{"requestId":"r","data":"h\u00e9llo","binary":false,"end":true,"cancel":false}`},
			seen{"POST", "http://m.invalid/x?q=1", `{"Accept":["a","b"],"Authorization":["Bearer k"]}`, "héllo", 6, ModelRequest{"s", "a", "p", "i", "t"}}},
		{"no body", `{"requestId":"r","method":"GET","url":"http://m.invalid/models","headers":{}}`,
			[]string{`{"requestId":"r","data":"","end":true}`},
			seen{"GET", "http://m.invalid/models", `{}`, "", 0, ModelRequest{}}},
		{"pieces", modelStart,
			[]string{`{"requestId":"r","data":"aGVs","binary":true}`, `{"requestId":"r","data":"lo "}`, `{"requestId":"r","data":"AP8=","binary":true}`, `{"requestId":"r","data":"","end":true}`},
			seen{"POST", "http://model.invalid/v1/x", `{}`, "hello \x00\xff", -1, ModelRequest{}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			id := fmt.Sprint("r", i)
			own := func(params string) string { return strings.Replace(params, `"r"`, strconv.Quote(id), 1) }
			p.begin(own(tt.start))
			for _, c := range tt.chunks {
				p.chunk(own(c))
			}
			got := await(t, "request", requests)
			if tt.want.length < 0 {
				got.length = -1 // whether the first piece was alone depends on who was faster
			}
			if got != tt.want {
				t.Errorf("got  %+v\nwant %+v", got, tt.want)
			}
			p.expect(id+` 201 Created {"x-id":["1","2"]}`, id+` ok binary=true end=false`, id+`  binary=true end=true`)
			p.chunk(own(`{"requestId":"r","data":"late"}`)) // ignored
		})
	}
}

// streamBody is a response body that a test writes.
func streamBody(status int) (*io.PipeWriter, *http.Response) {
	r, w := io.Pipe()
	return w, &http.Response{StatusCode: status, Body: r}
}

func TestModelTransportStreamsBothWays(t *testing.T) {
	leakCheck(t)
	_, p := newModelPeer(t, roundTripper(func(req *http.Request) (*http.Response, error) {
		w, resp := streamBody(200)
		go func() { // ends with the request's body
			_, err := io.Copy(w, req.Body)
			w.CloseWithError(err)
		}()
		return resp, nil
	}))
	p.begin(modelStart)
	p.chunk(`{"requestId":"r","data":"one"}`)
	p.expect(`r 200 OK {}`, `r one binary=true end=false`) // while the request goes on
	p.chunk(`{"requestId":"r","data":"two"}`)
	p.expect(`r two binary=true end=false`)
	p.chunk(`{"requestId":"r","data":"","end":true}`)
	p.expect(`r  binary=true end=true`)
}

func TestModelTransportPieces(t *testing.T) {
	leakCheck(t)
	body := strings.Repeat("0123456789abcdef", 5<<10) // 80 KiB
	_, p := newModelPeer(t, roundTripper(func(req *http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader(body))}, nil
	}))
	p.begin(modelStart)
	p.chunk(`{"requestId":"r","data":"","end":true}`)
	p.expect(`r 200 OK {}`)
	got := ""
	for {
		line := await(t, "piece", p.frames)
		data, _, _ := strings.Cut(strings.TrimPrefix(line, "r "), " binary")
		if len(data) > responsePiece {
			t.Errorf("a piece of %d bytes", len(data))
		}
		if got += data; strings.Contains(line, "end=true") {
			break
		}
	}
	if got != body {
		t.Errorf("got %d bytes, want %d", len(got), len(body))
	}
}

// brokenBody fails after its text.
type brokenBody struct {
	io.Reader
	closed chan struct{}
}

func (b brokenBody) Close() error { close(b.closed); return nil }

func TestModelTransportFailures(t *testing.T) {
	leakCheck(t)
	closed := make(chan struct{})
	respond := func(resp *http.Response, err error) roundTripper {
		return func(*http.Request) (*http.Response, error) { return resp, err }
	}
	ok := func(body io.Reader) *http.Response {
		return &http.Response{StatusCode: 200, Body: brokenBody{body, closed}}
	}
	before := func(message string) []string {
		return []string{`r 502 Bad Gateway {}`, `r  binary=true end=true {"message":"` + message + `"}`}
	}
	for _, tt := range []struct {
		name      string
		transport roundTripper
		start     string
		want      []string
	}{
		{name: "refused", transport: respond(nil, errors.New("dial: key-3cr3t refused")), want: before("dial: [redacted] refused")},
		{name: "nothing", transport: respond(nil, nil), want: before("Options.ModelTransport returned neither a response nor an error")},
		{name: "panic", transport: func(*http.Request) (*http.Response, error) { panic("no") }, want: before("the host's handler panicked")},
		{name: "goexit", transport: func(*http.Request) (*http.Response, error) { runtime.Goexit(); return nil, nil }, want: before("the host's handler panicked")},
		{name: "status", transport: respond(&http.Response{StatusCode: 101}, nil), want: before("the transport's response has the status 101")},
		{name: "header", transport: respond(&http.Response{StatusCode: 200, Header: http.Header{"X": {"a\r\nb"}}}, nil), want: before(`the transport's response has a header that is not valid: \"X\"`)},
		{name: "no body", transport: respond(&http.Response{StatusCode: 204}, nil), want: []string{`r 204 No Content {}`, `r  binary=true end=true`}},
		{name: "breaks", transport: respond(ok(io.MultiReader(strings.NewReader("half"), iotest.ErrReader(errors.New("reset")))), nil),
			want: []string{`r 200 OK {}`, `r half binary=true end=false`, `r  binary=true end=true {"message":"reset"}`}},
		{name: "no progress", transport: respond(&http.Response{StatusCode: 200, Body: io.NopCloser(iotest.ErrReader(nil))}, nil),
			want: []string{`r 200 OK {}`, `r  binary=true end=true {"message":"multiple Read calls return no data or error"}`}},
		{name: "URL", start: `{"requestId":"r","method":"POST","url":"http://a b","headers":{}}`, want: before(`not an HTTP request: \"POST\" \"http://a b\"`)},
		{name: "method", start: `{"requestId":"r","method":"P T","url":"http://a","headers":{}}`, want: before(`not an HTTP request: \"P T\" \"http://a\"`)},
		{name: "web socket", start: `{"requestId":"r","method":"GET","url":"ws://a","headers":{},"transport":"websocket"}`, want: before("Options.ModelTransport serves no web sockets")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, p := newModelPeer(t, tt.transport)
			if tt.start == "" {
				tt.start = `{"requestId":"r","method":"POST","url":"http://a","headers":{"authorization":["Bearer key-3cr3t"]}}`
			}
			p.begin(tt.start)
			p.chunk(`{"requestId":"r","data":"","end":true}`)
			p.expect(tt.want...)
		})
	}
	await(t, "the body's close", closed)

	t.Run("base64", func(t *testing.T) {
		_, p := newModelPeer(t, roundTripper(func(req *http.Request) (*http.Response, error) {
			_, err := io.ReadAll(req.Body)
			return nil, err
		}))
		p.begin(modelStart)
		p.chunk(`{"requestId":"r","data":"***","binary":true,"end":true}`)
		p.expect(before("a binary piece of the request body: illegal base64 data at input byte 0")...)
	})
	t.Run("params", func(t *testing.T) {
		_, p := newModelPeer(t, roundTripper(func(req *http.Request) (*http.Response, error) {
			<-req.Context().Done()
			return nil, req.Context().Err()
		}))
		p.begin(modelStart)
		for _, bad := range [][2]string{
			{"httpRequestStart", modelStart}, {"httpRequestStart", `{"method":"GET","url":"http://a"}`},
			{"httpRequestStart", `{"requestId":"q","headers":{"a":"b"}}`}, {"httpRequestStart", `[]`},
			{"httpRequestChunk", `{"requestId":3}`}, {"httpRequestChunk", `{"requestId":"r","data":7}`}, // the last one ends the exchange
		} {
			if got := hostAnswer(p.peer, "llmInference."+bad[0], bad[1]); !strings.HasPrefix(got, "-32602 params") {
				t.Errorf("%s %s: %s", bad[0], bad[1], got)
			}
		}
		if line := await(t, "start", p.frames); line != "r 499  {}" {
			t.Errorf("got %s", line)
		}
	})
	t.Run("none", func(t *testing.T) {
		_, p := newPeer(t, nil)
		if got, want := hostAnswer(p, "llmInference.httpRequestStart", modelStart), "-32603 this client has no model transport"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	})
}

func TestModelTransportCancel(t *testing.T) {
	leakCheck(t)
	const message = `{"message":"copilot: the request was resolved elsewhere: the runtime cancelled the model request","code":"cancelled"}`
	reading := make(chan error, 1)
	hang := roundTripper(func(req *http.Request) (*http.Response, error) {
		_, err := io.ReadAll(req.Body) // which knows nothing of contexts
		reading <- err
		return nil, err
	})
	t.Run("before the response", func(t *testing.T) {
		_, p := newModelPeer(t, hang)
		p.begin(modelStart)
		p.chunk(`{"requestId":"r","data":"part"}`)
		p.chunk(`{"requestId":"r","data":"","end":true,"cancel":true,"cancelReason":"runtime cancelled the request"}`)
		if err := await(t, "the body", reading); !errors.Is(err, errModelCancelled) {
			t.Error(err)
		}
		p.expect(`r 499  {}`, `r  binary=true end=true `+message)
	})
	t.Run("during the response", func(t *testing.T) {
		ended := make(chan error, 1)
		_, p := newModelPeer(t, roundTripper(func(req *http.Request) (*http.Response, error) {
			w, resp := streamBody(200)
			context.AfterFunc(req.Context(), func() { w.CloseWithError(req.Context().Err()) })
			go func() { // streams for ever: ends with the exchange
				for {
					if _, err := w.Write([]byte("more")); err != nil {
						ended <- err
						return
					}
				}
			}()
			return resp, nil
		}))
		p.begin(modelStart)
		p.chunk(`{"requestId":"r","data":"","end":true}`)
		p.expect(`r 200 OK {}`)
		await(t, "a piece", p.frames)
		p.chunk(`{"requestId":"r","data":"","cancel":true}`)
		await(t, "the end of the stream", ended)
		for line := ""; !strings.Contains(line, "end=true"); {
			if line = await(t, "the last piece", p.frames); strings.Contains(line, "end=true") && line != `r  binary=true end=true `+message {
				t.Errorf("got %s", line)
			}
		}
	})
	t.Run("not accepted", func(t *testing.T) {
		closed := make(chan struct{})
		_, p := newModelPeer(t, roundTripper(func(req *http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: 200, Body: brokenBody{io.MultiReader(strings.NewReader("a"), strings.NewReader("b")), closed}}, nil
		}))
		p.accept = func(m peerMessage) bool { return m.Method == "llmInference.httpResponseStart" }
		p.begin(modelStart)
		p.chunk(`{"requestId":"r","data":"","end":true}`)
		p.expect(`r 200 OK {}`, `r a binary=true end=false`)
		await(t, "the body's close", closed)
		p.begin(`{"requestId":"again","method":"GET","url":"http://a","headers":{}}`)
		p.chunk(`{"requestId":"again","data":"","cancel":true}`)
		for line := await(t, "the next exchange", p.frames); !strings.HasPrefix(line, "again "); line = await(t, "the next exchange", p.frames) {
			t.Errorf("after the refusal: %s", line)
		}
	})
	t.Run("session's end", func(t *testing.T) {
		c, p := newModelPeer(t, hang)
		s := createSession(t, c, &SessionConfig{SessionID: "s"})
		p.begin(`{"requestId":"r","sessionId":"s","method":"POST","url":"http://a","headers":{}}`)
		p.chunk(`{"requestId":"r","data":"part"}`)
		if err := s.Disconnect(testContext(t)); err != nil {
			t.Fatal(err)
		}
		if err := await(t, "the body", reading); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		if line := await(t, "start", p.frames); line != `r 499  {}` {
			t.Errorf("got %s", line)
		}
	})
	t.Run("client's end", func(t *testing.T) {
		c, p := newModelPeer(t, hang)
		p.begin(modelStart)
		p.chunk(`{"requestId":"r","data":"part"}`)
		c.ForceStop()
		if err := await(t, "the body", reading); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
}

func TestModelTransportOverflow(t *testing.T) {
	leakCheck(t)
	called, release, reading := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	c, p := newModelPeer(t, roundTripper(func(req *http.Request) (*http.Response, error) {
		if req.URL.Path == "/other" {
			return &http.Response{StatusCode: 200}, nil
		}
		close(called)
		<-release // reads nothing
		_, err := io.ReadAll(req.Body)
		reading <- err
		return nil, err
	}))
	p.begin(modelStart)
	p.chunk(`{"requestId":"r","data":"the first"}`)
	await(t, "transport", called)
	x := c.host.exchanges.find("r")
	x.body.mu.Lock()
	x.body.max = 1 << 10
	x.body.mu.Unlock()
	piece := `{"requestId":"r","data":"` + strings.Repeat("x", 1<<10) + `"}`
	p.chunk(piece) // one alone is taken, whatever its size
	if x.task.ctx.Err() != nil {
		t.Error("overflow by one piece")
	}
	p.chunk(piece)
	p.begin(`{"requestId":"o","method":"GET","url":"http://a/other","headers":{}}`)
	p.chunk(`{"requestId":"o","data":"","end":true}`)
	p.expect(`o 200 OK {}`, `o  binary=true end=true`) // nothing else is harmed
	close(release)
	if err := await(t, "the body", reading); !errors.Is(err, errBodyOverflow) {
		t.Error(err)
	}
	p.expect(`r 499  {}`, `r  binary=true end=true {"message":"too much of the request body waited to be read","code":"cancelled"}`)
}

func TestGitHubTelemetry(t *testing.T) {
	leakCheck(t)
	events := make(chan GitHubTelemetry, maxTelemetry+10)
	block, blocked := make(chan struct{}), make(chan struct{})
	logs := new(hdlLog)
	debug := slog.New(slog.NewTextHandler(logs, &slog.HandlerOptions{Level: slog.LevelDebug}))
	c, p := newPeer(t, &Options{Logger: debug, OnGitHubTelemetry: func(e GitHubTelemetry) {
		events <- e
		switch e.Event.Kind {
		case "panic":
			panic("no")
		case "goexit":
			runtime.Goexit()
		case "block":
			close(blocked)
			<-block
		}
	}})
	if got := p.wait("connect", 1).get("enableGitHubTelemetryForwarding"); got != true {
		t.Errorf("connect asks for telemetry: %v", got)
	}
	notify := func(params string) {
		p.send(notification("gitHubTelemetry.event", json.RawMessage(params)))
	}
	notify(`{"sessionId":"s","restricted":true,"event":{"kind":"k","created_at":"now","properties":{"a":"b"},"metrics":{"m":1.5},"features":{"f":"on"},"client":{"cli_version":"1","cpu_count":4,"is_staff":false}}}`)
	got := await(t, "event", events)
	if got.SessionID != "s" || !got.Restricted || got.Event.Kind != "k" || got.Event.Properties["a"] != "b" || got.Event.Metrics["m"] != 1.5 ||
		got.Event.Features["f"] != "on" || got.Event.Client.CLIVersion != "1" || got.Event.Client.CPUCount != 4 {
		t.Errorf("got %+v", got)
	}
	notify(`{"event":{"kind":null,"metrics":{"m":"odd"},"created_at":"kept"}}`)
	if got := await(t, "event", events); got.Event.CreatedAt != "kept" || got.Event.Kind != "" || len(got.Raw) == 0 {
		t.Errorf("odd event: %+v", got)
	}
	for _, kind := range []string{"panic", "goexit", "block"} {
		notify(`{"event":{"kind":"` + kind + `"}}`)
		if got := await(t, "event", events); got.Event.Kind != kind {
			t.Errorf("got %q, want %q", got.Event.Kind, kind)
		}
	}
	await(t, "the slow event", blocked)
	const dropped = 5
	for i := range maxTelemetry + dropped {
		notify(fmt.Sprintf(`{"event":{"kind":"%d"}}`, i))
	}
	p.sync() // the reader waits for nobody
	close(block)
	for i := dropped; i < maxTelemetry+dropped; i++ {
		if got := await(t, "event", events); got.Event.Kind != fmt.Sprint(i) {
			t.Fatalf("got %q, want %d", got.Event.Kind, i)
		}
	}
	if !strings.Contains(logs.String(), fmt.Sprint("count=", dropped)) {
		t.Errorf("the log does not count the dropped events:\n%s", logs)
	}
	if _, err := c.Ping(testContext(t), ""); err != nil {
		t.Error(err)
	}
}

func TestInstallCLI(t *testing.T) {
	leakCheck(t)
	ctx := testContext(t)
	dir := filepath.Join(t.TempDir(), "cache", "cli")
	program := []byte("#!/bin/sh\necho installed\n")
	install := func(r io.Reader) string {
		t.Helper()
		path, err := InstallCLI(ctx, dir, r)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, program) {
			t.Errorf("installed %q %v", got, err)
		}
		if info, err := os.Lstat(path); err != nil || !info.Mode().IsRegular() || runtime.GOOS != "windows" && info.Mode().Perm() != 0o755 {
			t.Errorf("installed with mode %v %v", info.Mode(), err)
		}
		if entries, _ := os.ReadDir(dir); len(entries) != 1 {
			t.Errorf("left behind: %v", entries)
		}
		return path
	}
	path := install(bytes.NewReader(program))
	if want := fmt.Sprintf("copilot-%x", sha256.Sum256(program)); !strings.HasPrefix(filepath.Base(path), want) {
		t.Errorf("name %s, want %s", filepath.Base(path), want)
	}
	before, _ := os.Stat(path)
	if again := install(bytes.NewReader(program)); again != path {
		t.Errorf("again: %s", again)
	}
	if again := install(struct{ io.Reader }{bytes.NewReader(program)}); again != path { // cannot seek
		t.Errorf("again: %s", again)
	}
	if after, _ := os.Stat(path); !os.SameFile(before, after) {
		t.Error("a good file was replaced")
	}
	for _, corrupt := range []func() error{
		func() error { return os.WriteFile(path, program[:3], 0o755) },
		func() error { return os.WriteFile(path, bytes.ToUpper(program), 0o755) },
		func() error { return os.Chmod(path, 0o644) },
		func() error {
			return errors.Join(os.Remove(path), os.WriteFile(path+"x", program, 0o755), os.Symlink(path+"x", path), os.Rename(path+"x", filepath.Join(filepath.Dir(dir), "x")))
		},
	} {
		if err := corrupt(); err != nil {
			t.Log(err) // no links here
		}
		install(bytes.NewReader(program))
	}
	os.Remove(path)
	var all []<-chan error
	for range 8 {
		all = append(all, async(func() error {
			got, err := InstallCLI(ctx, dir, bytes.NewReader(program))
			if err == nil && got != path {
				err = errors.New("installed as " + got)
			}
			return err
		}))
	}
	for _, one := range all {
		if err := await(t, "install", one); err != nil {
			t.Error(err)
		}
	}
	install(bytes.NewReader(program))

	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := InstallCLI(cancelled, dir, bytes.NewReader(program)); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	boom := errors.New("boom")
	for name, r := range map[string]io.Reader{"empty": strings.NewReader(""), "broken": iotest.ErrReader(boom), "broken later": io.MultiReader(strings.NewReader("x"), iotest.ErrReader(boom))} {
		if got, err := InstallCLI(ctx, dir, r); err == nil || got != "" || strings.HasPrefix(name, "broken") && !errors.Is(err, boom) {
			t.Errorf("%s: %q %v", name, got, err)
		}
	}
	if _, err := InstallCLI(ctx, path, bytes.NewReader(program)); err == nil { // the directory is a file
		t.Error("installed below a file")
	}
	install(bytes.NewReader(program)) // and nothing is left of the failures
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	if runtime.GOOS == "linux" {
		if got, err := InstallCLI(ctx, "", bytes.NewReader(program)); err != nil || !strings.HasPrefix(got, filepath.Join(os.Getenv("XDG_CACHE_HOME"), "copilot-go")) {
			t.Errorf("in the cache: %s %v", got, err)
		}
	}
}

// goTool runs the go command without network, in dir.
func goTool(t *testing.T, dir string, args ...string) {
	t.Helper()
	cmd := exec.Command("go", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOPROXY=off", "GOWORK=off", "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// buildChat builds examples/chat and returns how to run it: without a CLI and without anything of the user's.
func buildChat(t *testing.T) func(args ...string) *exec.Cmd {
	t.Helper()
	if testing.Short() {
		t.Skip("skipped: builds a program")
	}
	bin := filepath.Join(t.TempDir(), "chat.exe")
	goTool(t, ".", "build", "-o", bin, "./examples/chat")
	return func(args ...string) *exec.Cmd {
		cmd := exec.Command(bin, args...)
		home := t.TempDir()
		cmd.Dir = home
		for _, v := range os.Environ() {
			if name, _, _ := strings.Cut(v, "="); !strings.HasPrefix(name, "COPILOT_") && !strings.HasPrefix(name, "GITHUB_") && name != "GH_TOKEN" && name != "PATH" {
				cmd.Env = append(cmd.Env, v)
			}
		}
		cmd.Env = append(cmd.Env, "HOME="+home, "COPILOT_HOME="+home, "PATH="+home)
		return cmd
	}
}

// withCLI lets cmd find the real CLI, and skips the test where there is none.
func withCLI(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	cli := os.Getenv("COPILOT_CLI_PATH")
	if cli == "" {
		t.Skip("skipped: COPILOT_CLI_PATH names no CLI to test against")
	}
	cmd.Env = append(cmd.Env, "COPILOT_CLI_PATH="+cli, "PATH="+os.Getenv("PATH"))
}

// runChat runs cmd to its end, at most patience, and returns what it wrote and its exit code.
func runChat(t *testing.T, cmd *exec.Cmd) (stdout, stderr string, code int) {
	t.Helper()
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	code = waitChat(t, cmd)
	return out.String(), errOut.String(), code
}

func waitChat(t *testing.T, cmd *exec.Cmd) int {
	t.Helper()
	backstop := time.AfterFunc(3*patience, func() { cmd.Process.Kill() })
	defer backstop.Stop()
	var exit *exec.ExitError
	if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
		t.Error(err)
	}
	if left := mentioning(cmd.Dir); left != nil {
		t.Errorf("left behind: %v", left)
	}
	return cmd.ProcessState.ExitCode()
}

// mentioning lists the processes that have dir in their environment. Linux only.
func mentioning(dir string) (pids []string) {
	found, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, name := range found {
		if b, err := os.ReadFile(name); err == nil && bytes.Contains(b, []byte("="+dir+"\x00")) {
			pids = append(pids, filepath.Base(filepath.Dir(name)))
		}
	}
	return pids
}

func TestExampleChatDemo(t *testing.T) {
	chat := buildChat(t)
	for _, tt := range []struct {
		name, stdin    string
		args           []string
		stdout, stderr string // patterns
		code           int
	}{
		{name: "argument", args: []string{"-demo", "hello"}, stdout: `^This is a demo.*"hello".*\nThe die shows [1-6].*reject\.\n$`, stderr: `-> roll_dice \{"sides":6\}\n(.*\n)*<- "[1-6]"\n`},
		{name: "lines", stdin: "one\n\ntwo", args: []string{"-demo", "-yes"}, stdout: `"one".*\n.*approve-once\.\n.*"two".*\n.*approve-once\.\n$`, stderr: `^-> roll`},
		{name: "nobody to ask", args: []string{"-demo", "hello"}, stdout: `reject`, stderr: `refused: shell "date"`},
		{name: "arguments leave standard input alone", stdin: "three\n", args: []string{"-demo", "one", "two"}, stdout: `"one".*\n.*\n.*"two".*\n.*\n$`},
		{name: "nothing to say", args: []string{"-demo"}, stdout: `^$`, stderr: `^$`},
		{name: "no CLI", args: []string{"hello"}, stdout: `"hello"`, stderr: `no Copilot CLI found.*\nThis is the demo\.`},
		{name: "bad flag", args: []string{"-nonsense"}, stdout: `^$`, stderr: `-nonsense`, code: 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cmd := chat(tt.args...)
			cmd.Stdin = strings.NewReader(tt.stdin)
			stdout, stderr, code := runChat(t, cmd)
			if !regexp.MustCompile(tt.stdout).MatchString(stdout) || !regexp.MustCompile(tt.stderr).MatchString(stderr) || code != tt.code {
				t.Errorf("exit code %d, want %d\n%s\nwant %s\n%s\nwant %s", code, tt.code, stdout, tt.stdout, stderr, tt.stderr)
			}
		})
	}
}

// An interrupt ends the turn, and with it a conversation that nobody types; at the prompt it ends the conversation.
func TestExampleChatInterrupt(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("skipped: no interrupts between processes")
	}
	chat := buildChat(t)
	for _, tt := range []struct{ name, after, stderr string }{
		{"turn", "This", "turn aborted"},
		{"prompt", "reject.\n", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cmd := chat("-demo")
			stdin, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			defer stdin.Close()
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			io.WriteString(stdin, "hello\n")
			readUntil(t, stdout, tt.after)
			if err := cmd.Process.Signal(os.Interrupt); err != nil {
				t.Error(err)
			}
			if tt.name == "prompt" { // the turn may have ended just after the first one, which was then for nothing
				defer time.AfterFunc(time.Second, func() { _ = cmd.Process.Signal(os.Interrupt) }).Stop()
			}
			defer time.AfterFunc(patience, func() { _ = cmd.Process.Kill() }).Stop()
			rest, _ := io.ReadAll(stdout)
			if code := waitChat(t, cmd); code != 130 {
				t.Errorf("exit code %d, want 130", code)
			}
			if strings.Contains(string(rest), "die shows") {
				t.Errorf("the turn went on: %q", rest)
			}
			if !strings.Contains(stderr.String(), tt.stderr) {
				t.Errorf("got %q, want %q", stderr.String(), tt.stderr)
			}
		})
	}
}

// readUntil reads until the text has come.
func readUntil(t *testing.T, r io.Reader, text string) {
	t.Helper()
	var got []byte
	for b := make([]byte, 1); !bytes.Contains(got, []byte(text)); got = append(got, b...) {
		if _, err := io.ReadFull(r, b); err != nil {
			t.Fatalf("got %q, want %q: %v", got, text, err)
		}
	}
}

func TestRealExampleChat(t *testing.T) {
	chat := buildChat(t)
	t.Run("turn", func(t *testing.T) {
		model := newModelServer(t)
		cmd := chat("-base-url", model.URL+"/v1", "-model", "fake-model", `call: roll_dice {"sides":1}`, "say: good bye")
		withCLI(t, cmd)
		stdout, stderr, code := runChat(t, cmd)
		if want := "tool said: 1\ngood bye\n"; stdout != want || code != 0 {
			t.Errorf("exit code %d, got %q, want %q\n%s", code, stdout, want, stderr)
		}
	})
	t.Run("refused permission", func(t *testing.T) {
		model := newModelServer(t)
		cmd := chat("-base-url", model.URL+"/v1", "-model", "fake-model", `call: bash {"command":"touch made","description":"make a file"}`)
		withCLI(t, cmd)
		stdout, stderr, code := runChat(t, cmd)
		if !strings.Contains(stdout, "nobody is there") || code != 0 {
			t.Errorf("exit code %d, got %q\n%s", code, stdout, stderr)
		}
		if _, err := os.Stat(filepath.Join(cmd.Dir, "made")); err == nil {
			t.Error("the command ran")
		}
	})
	t.Run("interrupt", func(t *testing.T) {
		if runtime.GOOS == "windows" {
			t.Skip("skipped: no interrupts between processes")
		}
		model := newModelServer(t)
		cmd := chat("-base-url", model.URL+"/v1", "-model", "fake-model", "hold: one two")
		withCLI(t, cmd)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer cmd.Process.Kill()
		await(t, "the model's first word", model.Held)
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Error(err)
		}
		code := waitChat(t, cmd)
		if !strings.Contains(stderr.String(), "aborted") || code != 130 {
			t.Errorf("exit code %d\n%s", code, stderr.String())
		}
	})
	t.Run("no login", func(t *testing.T) {
		cmd := chat("hello")
		withCLI(t, cmd)
		stdout, stderr, code := runChat(t, cmd)
		if !strings.Contains(stderr, "copilot login") || stdout != "" || code != 1 {
			t.Errorf("exit code %d, got %q\n%s", code, stdout, stderr)
		}
	})
}

// README's program is built as README says that a vendored build is made.
func TestReadme(t *testing.T) {
	if testing.Short() {
		t.Skip("skipped: builds a program")
	}
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```(go|sh)\n(.*?)```").FindAllStringSubmatch(string(readme), -1)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module example.com/app\n\ngo 1.23\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	copySource(t, filepath.Join(dir, "third_party", "copilot"))
	programs, commands := 0, 0
	for _, block := range blocks {
		switch text := block[2]; {
		case block[1] == "go":
			programs++
			sub := filepath.Join(dir, "cmd", fmt.Sprint("program", programs))
			if err := os.MkdirAll(sub, 0o777); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(sub, "main.go"), []byte(text), 0o666); err != nil {
				t.Fatal(err)
			}
		case strings.Contains(text, "-replace="):
			for _, line := range strings.Split(strings.TrimSpace(text), "\n") {
				commands++
				goTool(t, dir, strings.Fields(line)[1:]...)
			}
		}
	}
	if programs == 0 || commands == 0 {
		t.Fatalf("found %d programs and %d commands", programs, commands)
	}
	goTool(t, dir, "vet", "-mod=vendor", "./...")
	if _, err := os.Stat(filepath.Join(dir, "go.sum")); err == nil {
		t.Error("there is a go.sum")
	}
}

// copySource copies what a dependent needs: the Go files and go.mod.
func copySource(t *testing.T, to string) {
	t.Helper()
	if err := os.MkdirAll(to, 0o777); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range append(files, "go.mod", "LICENSE") {
		b, err := os.ReadFile(name)
		if err == nil {
			err = os.WriteFile(filepath.Join(to, name), b, 0o666)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// The benchmarks: each piece of work over an in-memory pipe and over a child's stdio, and beside it, as "limit", what the bare work costs over
// the same transport: frames read and walked once, requests written as they were encoded before. One run gives the ratio:
//
//	go test -run '^$' -bench . -cpu 2 .
//
// cpu-ns/op is the CPU time of this process for one operation, without the child's; ns/op is the time that passed. The pipe's server is
// part of this process, so it has no such number. Allocations are the client's in both.

// benchServer is a server that costs little: its frames are encoded before they are asked for, and what it writes goes out together.
type benchServer struct {
	in     *bufio.Reader
	out    io.Writer
	body   []byte
	outbox []byte
	frames map[string][][]byte // of events, by the params of the request for them
	tools  [][]byte            // tool calls that are to be sent
	open   int                 // tool calls that wait for their answer
	asked  []byte              // id of the request for tool calls
	calls  int
}

const benchWrite = 64 << 10

func newBenchServer(in io.Reader, out io.Writer) *benchServer {
	return &benchServer{in: bufio.NewReaderSize(in, benchWrite), out: out, frames: make(map[string][][]byte)}
}

// serve answers until the client goes away.
func (s *benchServer) serve() {
	for {
		if s.in.Buffered() == 0 && !s.flush() {
			return
		}
		line, err := s.in.ReadSlice('\n')
		if err != nil {
			return
		}
		n := int(parseLength(bytes.TrimSpace(line[len("Content-Length:"):])))
		if _, err = s.in.Discard(len("\r\n")); err != nil || n < 0 {
			return
		}
		if cap(s.body) < n {
			s.body = make([]byte, n)
		}
		if _, err = io.ReadFull(s.in, s.body[:n]); err != nil {
			return
		}
		s.request(s.body[:n])
	}
}

func (s *benchServer) flush() bool {
	if len(s.outbox) == 0 { // to a net.Pipe even nothing is a write that waits
		return true
	}
	_, err := s.out.Write(s.outbox)
	s.outbox = s.outbox[:0]
	return err == nil
}

func (s *benchServer) send(frame []byte) {
	s.outbox = append(s.outbox, frame...)
	if len(s.outbox) >= benchWrite {
		s.flush()
	}
}

func (s *benchServer) answer(id []byte, result string) {
	n := len(`{"jsonrpc":"2.0","id":,"result":}`) + len(id) + len(result)
	s.outbox = strconv.AppendInt(append(s.outbox, "Content-Length: "...), int64(n), 10)
	s.outbox = append(append(s.outbox, "\r\n\r\n"+`{"jsonrpc":"2.0","id":`...), id...)
	s.outbox = append(append(append(s.outbox, `,"result":`...), result...), '}')
}

func (s *benchServer) request(body []byte) {
	var m message
	if !m.parse(body) {
		return
	}
	switch string(m.method) {
	case `"connect"`:
		s.answer(m.id, `{"ok":true,"protocolVersion":3,"version":"1.0.102"}`)
	case `"session.create"`:
		s.answer(m.id, `{"sessionId":`+string(m.sessionID)+`,"workspacePath":"/w","capabilities":{"ui":{"elicitation":true}}}`)
	case `"bench.emit"`:
		n, frames := s.framesOf(m.params)
		for i := range n {
			s.send(frames[i%len(frames)])
		}
		s.answer(m.id, `{}`)
	case `"bench.tools"`:
		n, frames := s.framesOf(m.params)
		s.asked = append(s.asked[:0], m.id...)
		s.tools, s.open = frames[:n], n
		inFlight, _ := strconv.Atoi(string(member(m.params, "inFlight")))
		for range min(inFlight, n) {
			s.callTool()
		}
	case `"session.tools.handlePendingToolCall"`:
		s.answer(m.id, `{"success":true}`)
		s.callTool()
		if s.open--; s.open == 0 {
			s.answer(s.asked, `{}`)
		}
	default:
		s.answer(m.id, `{"message":"pong","protocolVersion":3}`)
	}
}

// callTool sends the next tool call. Each has a request id of its own, as a server's have: the client takes a known one for a repetition.
func (s *benchServer) callTool() {
	if len(s.tools) > 0 {
		s.calls++
		digits := s.tools[0][bytes.Index(s.tools[0], []byte("request-"))+len("request-"):]
		for i, n := 9, s.calls; n > 0; i, n = i-1, n/10 {
			digits[i] = '0' + byte(n%10)
		}
		s.send(s.tools[0])
		s.tools = s.tools[1:]
	}
}

// benchWork is what a benchServer is asked to send: n events in turn to as many sessions, whose names are s0 and so on.
type benchWork struct {
	Kind     string `json:"kind"` // what Size is of: "delta" or "tool"
	Size     int    `json:"size"` // bytes of a body
	Sessions int    `json:"sessions"`
	InFlight int    `json:"inFlight"` // tool calls
	N        int    `json:"n"`        // stands last: frames are kept for what stands before
}

func (w benchWork) params(n int) json.RawMessage {
	w.N = n
	raw, _ := json.Marshal(w)
	return raw
}

// batch is how many events are asked for at once: fewer than a session's buffer holds, so that nobody lags, and no more than 16 MB.
func (w benchWork) batch() int { return max(1, min(defaultEventBuffer, 16<<20/w.Size)) }

func (s *benchServer) framesOf(params []byte) (n int, frames [][]byte) {
	key, _, _ := bytes.Cut(params, []byte(`"n":`))
	n, _ = strconv.Atoi(string(member(params, "n")))
	if frames = s.frames[string(key)]; frames == nil {
		var w benchWork
		_ = json.Unmarshal(params, &w)
		frames = w.frames()
		s.frames[string(key)] = frames
	}
	return n, frames
}

func (w benchWork) frames() (frames [][]byte) {
	for i := range max(w.Sessions, w.batch()) {
		event := map[string]any{"type": "assistant.message_delta", "id": newUUID(), "parentId": newUUID(),
			"timestamp": "2026-01-02T03:04:05.678Z", "ephemeral": true}
		data := map[string]any{"messageId": newUUID(), "deltaContent": ""}
		filler := "deltaContent"
		if w.Kind == "tool" {
			event["type"] = "external_tool.requested"
			filler = "workingDirectory"
			data = map[string]any{"requestId": "request-0000000000", "toolCallId": newUUID(), "toolName": "t", "arguments": map[string]any{"q": "x"}, filler: ""}
		}
		event["data"] = data
		m := notification("session.event", map[string]any{"sessionId": fmt.Sprint("s", i%w.Sessions), "event": event})
		bare, _ := json.Marshal(m)
		words := strings.Repeat("some words ", w.Size/11+1)
		data[filler] = words[:max(0, w.Size-len(bare))]
		frames = append(frames, encodeFrame(m))
		if w.Size >= 1<<20 {
			return frames // one is enough to be copied
		}
	}
	return frames
}

// benchTransports runs f over each transport.
func benchTransports(b *testing.B, f func(b *testing.B, transport string)) {
	for _, transport := range []string{"pipe", "child"} {
		b.Run(transport, func(b *testing.B) { f(b, transport) })
	}
}

// benchDial connects to a benchServer. The connection ends with the benchmark.
func benchDial(b testing.TB, transport string) io.ReadWriteCloser {
	if transport == "pipe" {
		near, far := net.Pipe()
		done := make(chan struct{})
		go func() { // ends when the near end is closed
			defer close(done)
			newBenchServer(far, far).serve()
		}()
		b.Cleanup(func() {
			near.Close()
			await(b, "server's end", done)
		})
		return near
	}
	self, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), "COPILOT_TEST_CHILD=bench")
	in, inErr := cmd.StdinPipe()
	out, outErr := cmd.StdoutPipe()
	if inErr != nil || outErr != nil {
		b.Fatal(inErr, outErr)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			b.Error(err)
		}
	})
	return &stdioPipes{out, in}
}

func benchClient(b testing.TB, transport string) *Client {
	c, err := NewClient(testContext(b), benchDial(b, transport), nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		c.ForceStop()
		await(b, "client's end", c.Done())
	})
	return c
}

// cpuTime is the CPU time of this process so far, 0 where the system does not tell in a file.
func cpuTime() time.Duration {
	stat, _ := os.ReadFile("/proc/self/stat")
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 13 {
		return 0
	}
	user, _ := strconv.Atoi(fields[11])
	system, _ := strconv.Atoi(fields[12])
	return time.Duration(user+system) * (time.Second / 100)
}

// benchMeasure runs f, which does the work b.N times, as what is measured.
func benchMeasure(b *testing.B, transport string, f func()) {
	b.ReportAllocs()
	runtime.GC()
	before := cpuTime()
	b.ResetTimer()
	f()
	b.StopTimer()
	if used := cpuTime() - before; transport == "child" && used > 0 {
		b.ReportMetric(float64(used)/float64(b.N), "cpu-ns/op")
	}
}

// benchBatches asks for b.N events, batch by batch, each when the one before has been dealt with.
func benchBatches(b *testing.B, w benchWork, batch func(n int)) {
	for sent, size := 0, w.batch(); sent < b.N; sent += size {
		batch(min(size, b.N-sent))
	}
}

func BenchmarkEvent(b *testing.B) {
	reads := []struct {
		name string
		read func(b *testing.B, e Event)
	}{
		{"envelope", func(b *testing.B, e Event) {
			if e.Type != EventAssistantMessageDelta {
				b.Error(e.Type)
			}
		}},
		{"payload", func(b *testing.B, e Event) {
			if d, ok := e.Payload().(*AssistantMessageDelta); !ok || d.DeltaContent == "" {
				b.Error("no text")
			}
		}},
	}
	benchTransports(b, func(b *testing.B, transport string) {
		for _, size := range []int{414, 1 << 10, 64 << 10, 1 << 20, 16 << 20} {
			w := benchWork{Kind: "delta", Size: size, Sessions: 1}
			for _, read := range reads {
				b.Run(fmt.Sprintf("size=%d/%s", size, read.name), func(b *testing.B) { benchEvents(b, transport, w, 1, read.read) })
			}
			b.Run(fmt.Sprintf("size=%d/envelope-limit", size), func(b *testing.B) { benchEventLimit(b, transport, w, false) })
			b.Run(fmt.Sprintf("size=%d/payload-limit", size), func(b *testing.B) { benchEventLimit(b, transport, w, true) })
		}
		w := benchWork{Kind: "delta", Size: 414, Sessions: 1}
		for _, subscribers := range []int{1, 10, 100, 1000} {
			b.Run(fmt.Sprintf("subscribers=%d", subscribers), func(b *testing.B) { benchEvents(b, transport, w, subscribers, reads[0].read) })
		}
		for _, sessions := range []int{1, 16, 256, 10_000} {
			w.Sessions = sessions
			b.Run(fmt.Sprintf("sessions=%d", sessions), func(b *testing.B) { benchEvents(b, transport, w, 1, reads[0].read) })
		}
	})
}

// benchEvents: each session has so many subscribers, which read every event.
func benchEvents(b *testing.B, transport string, w benchWork, subscribers int, read func(b *testing.B, e Event)) {
	c := benchClient(b, transport)
	ctx, cancel := context.WithCancel(context.Background())
	var left atomic.Int64
	var readers sync.WaitGroup
	done := make(chan struct{}, 1)
	for i := range w.Sessions {
		s, err := c.CreateSession(ctx, &SessionConfig{SessionID: fmt.Sprint("s", i)})
		if err != nil {
			b.Fatal(err)
		}
		for range subscribers {
			sub := s.Subscribe()
			readers.Add(1)
			go func() { // ends with ctx
				defer readers.Done()
				for e, err := range sub.All(ctx) {
					if err != nil {
						if ctx.Err() == nil {
							b.Error(err)
						}
						return
					}
					read(b, e)
					if left.Add(-1) == 0 {
						done <- struct{}{}
					}
				}
			}()
		}
	}
	defer readers.Wait()
	defer cancel()
	ask := func(n int) {
		left.Store(int64(n * subscribers))
		if err := c.Call(ctx, "bench.emit", w.params(n), nil); err != nil {
			b.Fatal(err)
		}
		<-done
	}
	ask(w.batch()) // the server makes its frames
	b.SetBytes(int64(w.Size))
	benchMeasure(b, transport, func() { benchBatches(b, w, ask) })
	if subscribers > 1 {
		b.ReportMetric(float64(b.Elapsed())/float64(b.N)/float64(subscribers), "ns/read")
	}
}

// benchEventLimit reads the same frames, walks them once and keeps nothing; or decodes the payload with encoding/json.
func benchEventLimit(b *testing.B, transport string, w benchWork, payload bool) {
	rwc := benchDial(b, transport)
	r := newFrameReader(rwc, defaultMaxFrame)
	ask := func(n int) {
		request := notification("bench.emit", w.params(n))
		request["id"] = 1
		if _, err := rwc.Write(encodeFrame(request)); err != nil {
			b.Fatal(err)
		}
		for range n + 1 {
			m := benchRead(b, r)
			if payload && m.event != nil {
				var d AssistantMessageDelta
				if err := json.Unmarshal(m.fields.data, &d); err != nil {
					b.Fatal(err)
				}
			}
		}
	}
	ask(w.batch())
	b.SetBytes(int64(w.Size))
	benchMeasure(b, transport, func() { benchBatches(b, w, ask) })
}

// benchRead reads a frame and walks it.
func benchRead(b *testing.B, r *frameReader) (m message) {
	body, err := r.next()
	if err != nil || !m.parse(body) {
		b.Fatal("no message: ", err)
	}
	return m
}

func BenchmarkCall(b *testing.B) {
	benchTransports(b, func(b *testing.B, transport string) {
		for _, callers := range []int{1, 16, 256} {
			b.Run(fmt.Sprintf("callers=%d/call", callers), func(b *testing.B) {
				c := benchClient(b, transport)
				benchMeasure(b, transport, func() {
					var left atomic.Int64
					left.Store(int64(b.N))
					var done sync.WaitGroup
					for range callers {
						done.Add(1)
						go func() { // ends when all calls are made
							defer done.Done()
							for left.Add(-1) >= 0 {
								if err := c.Call(context.Background(), "ping", nil, nil); err != nil {
									b.Error(err)
									return
								}
							}
						}()
					}
					done.Wait()
				})
			})
			b.Run(fmt.Sprintf("callers=%d/limit", callers), func(b *testing.B) {
				rwc := benchDial(b, transport)
				r := newFrameReader(rwc, defaultMaxFrame)
				request := encodeFrame(map[string]any{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": struct{}{}})
				requests := bytes.Repeat(request, callers)
				benchMeasure(b, transport, func() {
					for left := b.N; left > 0; left -= callers {
						n := min(left, callers)
						if _, err := rwc.Write(requests[:n*len(request)]); err != nil {
							b.Fatal(err)
						}
						for range n {
							benchRead(b, r)
						}
					}
				})
			})
		}
	})
}

// BenchmarkTool is a tool call of the server: its event, the handler, the answer, and the server's answer to that.
func BenchmarkTool(b *testing.B) {
	benchTransports(b, func(b *testing.B, transport string) {
		for _, inFlight := range []int{1, 64} {
			w := benchWork{Kind: "tool", Size: 414, Sessions: 1, InFlight: inFlight}
			b.Run(fmt.Sprintf("inflight=%d/tool", inFlight), func(b *testing.B) {
				c := benchClient(b, transport)
				tool := Tool{Name: "t", Handler: func(context.Context, ToolCall) (ToolResult, error) { return ToolResult{Text: "done"}, nil }}
				if _, err := c.CreateSession(testContext(b), &SessionConfig{SessionID: "s0", Tools: []Tool{tool}}); err != nil {
					b.Fatal(err)
				}
				ask := func(n int) {
					if err := c.Call(context.Background(), "bench.tools", w.params(n), nil); err != nil {
						b.Fatal(err)
					}
				}
				ask(w.batch())
				benchMeasure(b, transport, func() { benchBatches(b, w, ask) })
			})
			b.Run(fmt.Sprintf("inflight=%d/limit", inFlight), func(b *testing.B) {
				rwc := benchDial(b, transport)
				r := newFrameReader(rwc, defaultMaxFrame)
				params := map[string]any{"sessionId": "s0", "requestId": newUUID(), "result": "done"}
				answer := encodeFrame(map[string]any{"jsonrpc": "2.0", "id": 2, "method": "session.tools.handlePendingToolCall", "params": params})
				var out []byte
				ask := func(n int) {
					request := notification("bench.tools", w.params(n))
					request["id"] = 1
					out = append(out[:0], encodeFrame(request)...)
					for left := 2*n + 1; left > 0; left-- { // n calls, n answers to ours, and one in the end
						if len(out) > 0 && r.br.Buffered() == 0 {
							if _, err := rwc.Write(out); err != nil {
								b.Fatal(err)
							}
							out = out[:0]
						}
						if m := benchRead(b, r); m.event != nil {
							out = append(out, answer...)
						}
					}
				}
				ask(w.batch())
				benchMeasure(b, transport, func() { benchBatches(b, w, ask) })
			})
		}
	})
}

// BenchmarkCreate is a session's create. Its limit is the request's params by encoding/json, and the round trip.
func BenchmarkCreate(b *testing.B) {
	benchTransports(b, func(b *testing.B, transport string) {
		b.Run("create", func(b *testing.B) {
			c := benchClient(b, transport)
			ctx := context.Background()
			benchMeasure(b, transport, func() {
				for range b.N {
					if _, err := c.CreateSession(ctx, nil); err != nil {
						b.Fatal(err)
					}
				}
			})
		})
		b.Run("limit", func(b *testing.B) {
			rwc := benchDial(b, transport)
			r := newFrameReader(rwc, defaultMaxFrame)
			type params struct {
				SessionID                      string `json:"sessionId"`
				EnvValueMode                   string `json:"envValueMode"`
				ToolFilterPrecedence           string `json:"toolFilterPrecedence"`
				Hooks                          bool   `json:"hooks"`
				IncludeSubAgentStreamingEvents bool   `json:"includeSubAgentStreamingEvents"`
			}
			type request struct {
				Version string `json:"jsonrpc"`
				ID      int    `json:"id"`
				Method  string `json:"method"`
				Params  params `json:"params"`
			}
			benchMeasure(b, transport, func() {
				for i := range b.N {
					body, err := json.Marshal(request{"2.0", i, "session.create", params{newUUID(), "direct", "excluded", false, true}})
					if err != nil {
						b.Fatal(err)
					}
					if _, err = fmt.Fprintf(rwc, "Content-Length: %d\r\n\r\n%s", len(body), body); err != nil {
						b.Fatal(err)
					}
					benchRead(b, r)
				}
			})
		})
	})
	b.Run("prepare", func(b *testing.B) {
		c := benchClient(b, "pipe")
		benchMeasure(b, "pipe", func() {
			for range b.N {
				if _, err := c.PrepareSession(nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	})
}

// idleSessions opens n sessions and returns what one of them holds: bytes of heap, bytes of stacks, goroutines.
func idleSessions(t testing.TB, n int) (heap, stack, goroutines float64) {
	c := benchClient(t, "pipe")
	s := createSession(t, c, nil) // what the first one alone brings
	measure := func() (m runtime.MemStats, g int) {
		runtime.GC()
		runtime.GC() // pools are empty after the second
		runtime.ReadMemStats(&m)
		return m, runtime.NumGoroutine()
	}
	before, g := measure()
	for range n {
		if _, err := c.CreateSession(context.Background(), nil); err != nil {
			t.Fatal(err)
		}
	}
	after, h := measure()
	runtime.KeepAlive(s)
	per := func(after, before uint64) float64 { return (float64(after) - float64(before)) / float64(n) }
	return per(after.HeapAlloc, before.HeapAlloc), per(after.StackInuse, before.StackInuse), float64(h-g) / float64(n)
}

// BenchmarkIdle tells what an open session holds that nobody uses.
func BenchmarkIdle(b *testing.B) {
	var heap, stack, goroutines float64
	for range b.N {
		heap, stack, goroutines = idleSessions(b, 10_000)
	}
	b.ReportMetric(heap, "heap-B/session")
	b.ReportMetric(stack, "stack-B/session")
	b.ReportMetric(goroutines, "goroutines/session")
}

func TestIdleSessionHoldsLittle(t *testing.T) {
	heap, _, goroutines := idleSessions(t, 1000)
	if heap > 2048 || goroutines > 0 {
		t.Errorf("an idle session holds %.0f bytes and %v goroutines", heap, goroutines)
	}
}

func TestAllocations(t *testing.T) {
	c := benchClient(t, "pipe")
	ctx := context.Background()
	open := func(id string, cfg SessionConfig) *Session {
		cfg.SessionID = id
		return createSession(t, c, &cfg)
	}
	tool := Tool{Name: "t", Handler: func(context.Context, ToolCall) (ToolResult, error) { return ToolResult{Text: "done"}, nil }}
	open("s0", SessionConfig{Tools: []Tool{tool}})
	tools := benchWork{Kind: "tool", Size: 414, Sessions: 1, InFlight: 64}
	const batch = 64

	// event takes a frame the way the connection's reader does, which is idle, and lets each subscriber read it.
	frame := benchWork{Kind: "delta", Size: 414, Sessions: 1}.frames()[0]
	event := func(subscribers int, read func(e Event)) func() {
		id := newUUID()
		s := open(id, SessionConfig{})
		subs := make([]*Subscription[Event], subscribers)
		for i := range subs {
			subs[i] = s.Subscribe()
		}
		stream := &frameReader{br: bufio.NewReader(nil), max: defaultMaxFrame}
		frame := bytes.Replace(frame, []byte(`"s0"`), []byte(`"`+id+`"`), 1)
		body := frame[bytes.IndexByte(frame, '{'):]
		frame = append(fmt.Appendf(nil, "Content-Length: %d\r\n\r\n", len(body)), body...)
		in := bytes.NewReader(nil)
		var m message
		return func() {
			in.Reset(frame)
			stream.br.Reset(in)
			body, err := stream.next()
			if err != nil || !m.parse(body) {
				t.Fatal("no message: ", err)
			}
			c.dispatch(&m)
			for _, sub := range subs {
				e, err := sub.Next(ctx)
				if err != nil {
					t.Fatal(err)
				}
				read(e)
			}
		}
	}
	envelope := func(e Event) {}
	for _, tt := range []struct {
		name string
		most float64
		f    func()
	}{
		{"event", 4, event(1, envelope)},
		{"event to many", 4, event(100, envelope)},
		{"event with payload", 12, event(1, func(e Event) { e.Payload() })},
		{"call", 12, func() {
			if err := c.Call(ctx, "ping", nil, nil); err != nil {
				t.Fatal(err)
			}
		}},
		{"tools", 30 * batch, func() {
			if err := c.Call(ctx, "bench.tools", tools.params(batch), nil); err != nil {
				t.Fatal(err)
			}
		}},
		{"create", 60, func() { open("", SessionConfig{}) }},
	} {
		if got := testing.AllocsPerRun(100, tt.f); got > tt.most {
			t.Errorf("%s: %v allocations, at most %v are expected", tt.name, got, tt.most)
		}
	}
}

func TestLargeEventIsHeldOnce(t *testing.T) {
	const runs = 4
	frame := benchWork{Kind: "delta", Size: 1 << 20, Sessions: 1}.frames()[0]
	r := newFrameReader(bytes.NewReader(bytes.Repeat(frame, runs)), defaultMaxFrame)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range runs {
		var m message
		body, err := r.next()
		if err != nil || !m.parse(body) {
			t.Fatal("no message: ", err)
		}
		if e := newEvent(&m.fields, nil); len(e.Data) < 1<<19 {
			t.Fatalf("data of %d bytes", len(e.Data))
		}
	}
	runtime.ReadMemStats(&after)
	if got := (after.TotalAlloc - before.TotalAlloc) / runs; got > 12<<20/10 {
		t.Errorf("an event of 1 MB allocates %d bytes", got)
	}
}

// A call that is given up while the writer is busy with another frame leaves no trace on the wire.
func TestWithdrawnCallIsNotSent(t *testing.T) {
	leakCheck(t)
	near, far := net.Pipe()
	c := newConn(near, defaultMaxFrame, slog.New(discardHandler{}))
	c.handle, c.ended = func(*message) {}, func(error) {}
	c.start()
	defer func() {
		near.Close()
		await(t, "reader's end", c.readDone)
		await(t, "writer's end", c.writeDone)
	}()
	if err := c.reply([]byte("1"), nil, nil); err != nil { // the writer has it, and nobody reads
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var finished error
	given := async(func() error {
		_, err := c.call(ctx, &call{method: "never", then: func(_ json.RawMessage, err error) { finished = err }}, nil)
		return err
	})
	until(t, "queued", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.waiting) == 1
	})
	cancel()
	if err := await(t, "call", given); !errors.Is(err, context.Canceled) || finished != err {
		t.Errorf("got %v, then got %v", err, finished)
	}
	later := async(func() error { return c.reply([]byte("2"), nil, nil) })
	r := newFrameReader(far, defaultMaxFrame)
	for _, want := range []string{"1", "2"} {
		body, err := r.next()
		var m message
		if err != nil || !m.parse(body) || string(m.id) != want {
			t.Errorf("got %q, %v; want the answer to %s", body, err, want)
		}
	}
	if err := await(t, "reply", later); err != nil {
		t.Error(err)
	}
}

// errFault is how an injected fault shows where it is more than the end of the stream.
var errFault = errors.New("fault")

// faultPlan says what goes wrong on a wire. The zero value cuts both directions before the first byte; start from noFault.
type faultPlan struct {
	in     int  // the client can read that many bytes, then readErr; -1: all
	eager  bool // readErr comes together with the last bytes
	split  int  // a read ends at that offset and at each further faultStep bytes; -1: where it likes
	chunk  int  // bytes that one read returns at most; 0: as many as fit
	out    int  // the client can write that many bytes; then the peer is gone, and reads end in readErr; -1: all
	lost   bool // what is written to a peer that is gone seems to succeed, until a read says otherwise
	write  int  // the number of the write that goes wrong, from 0; -1: none
	keep   int  // bytes that this write leaves
	silent bool // it tells a short count and no error; with a negative keep, that it took nothing
	dribs  bool // every write takes one byte

	readErr error
}

const faultStep = 256 // more than most frames have

var noFault = faultPlan{in: -1, split: -1, out: -1, write: -1, readErr: io.EOF}

// faultWire is a byte stream with a scripted server at its other end, which answers within Write. It has no goroutine, and the same calls
// make the same bytes.
type faultWire struct {
	faultPlan

	mu      sync.Mutex
	change  sync.Cond
	request []byte // what the server has not understood yet
	answer  []byte // what the client has not read yet
	sent    int    // bytes to the client
	read    int    // of which it has read
	written int    // bytes from the client
	writes  []int  // their sizes
	turns   int
	gone    bool // the server
	closed  bool

	events map[string][]faultEvent
}

type faultEvent struct {
	id  string
	end int // the offset of the byte after it
}

func newFaultWire(p faultPlan) *faultWire {
	w := &faultWire{faultPlan: p, events: make(map[string][]faultEvent)}
	w.change.L = &w.mu
	return w
}

func (w *faultWire) Read(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		if w.closed {
			return 0, io.ErrClosedPipe
		}
		n := min(len(p), len(w.answer))
		if w.in >= 0 {
			n = min(n, w.in-w.read)
		}
		if w.chunk > 0 {
			n = min(n, w.chunk)
		}
		switch {
		case w.split > w.read:
			n = min(n, w.split-w.read)
		case w.split >= 0:
			n = min(n, faultStep-(w.read-w.split)%faultStep)
		}
		if n > 0 {
			copy(p, w.answer[:n])
			w.answer = w.answer[n:]
			w.read += n
			if w.eager && w.read == w.in {
				return n, w.readErr
			}
			return n, nil
		}
		if w.read == w.in || w.gone && len(w.answer) == 0 {
			return 0, w.readErr
		}
		w.change.Wait()
	}
}

func (w *faultWire) Write(p []byte) (n int, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	defer w.change.Broadcast()
	if w.closed {
		return 0, io.ErrClosedPipe
	}
	n = len(p)
	if w.dribs {
		n = min(n, 1)
	}
	if len(w.writes) == w.write {
		switch {
		case !w.silent:
			n, err = max(n-w.keep, 0), errFault
		case w.keep < 0:
			n = 0
		default:
			n = max(n-w.keep, 1) // frames share a write or not, so that the sizes vary
		}
	}
	if w.out >= 0 && w.written+n >= w.out {
		n = w.out - w.written
		w.gone = true
		if n < len(p) {
			err = errFault
		}
	}
	w.writes = append(w.writes, len(p))
	w.written += n
	w.request = append(w.request, p[:n]...)
	for w.serve() {
	}
	if w.gone && w.lost {
		return len(p), nil
	}
	return n, err
}

func (w *faultWire) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	w.change.Broadcast()
	return nil
}

// serve answers one request, if there is a whole one.
func (w *faultWire) serve() bool {
	r := bytes.NewReader(w.request)
	fr := newFrameReader(r, defaultMaxFrame)
	body, err := fr.next()
	if err != nil {
		return false
	}
	w.request = w.request[len(w.request)-r.Len()-fr.br.Buffered():]
	var m peerMessage
	if json.Unmarshal(body, &m) != nil {
		panic("the client sent what is not JSON")
	}
	id := fmt.Sprint(m.get("sessionId"))
	result := func(v any) { w.send(map[string]any{"jsonrpc": "2.0", "id": m.ID, "result": v}) }
	event := func(id, typ string, data any) {
		name := fmt.Sprint("e", w.sent)
		w.send(notification("session.event", map[string]any{"sessionId": id, "event": map[string]any{"id": name, "type": typ, "data": data}}))
		w.events[id] = append(w.events[id], faultEvent{name, w.sent})
	}
	switch m.Method {
	case "connect":
		result(map[string]any{"ok": true, "protocolVersion": 3})
	case "session.create":
		event(id, "session.start", map[string]any{"sessionId": id})
		result(map[string]any{"sessionId": id})
	case "session.send":
		w.turns++
		message := fmt.Sprint("m", w.turns)
		result(map[string]any{"messageId": message})
		event(id, "user.message", map[string]any{"messageId": message, "content": "hi"})
		event("b", "session.title_changed", map[string]any{"title": message})
		if w.turns == 1 {
			event(id, "external_tool.requested", map[string]any{"requestId": "r", "toolName": "t", "toolCallId": "c", "arguments": map[string]any{"é": 1}})
			break
		}
		w.send(map[string]any{"jsonrpc": "2.0", "id": "q", "method": "future.question", "params": map[string]any{"sessionId": id}})
		event(id, "assistant.message_delta", map[string]any{"messageId": "a", "deltaContent": "wör"})
	case hdlTool:
		result(map[string]any{"success": true})
		event(id, "external_tool.completed", map[string]any{"requestId": "r"})
		event(id, "assistant.message", map[string]any{"messageId": "a", "content": "dönε"})
		event(id, "session.idle", map[string]any{})
	case "session.abort":
		event(id, "abort", map[string]any{"reason": "user_initiated"})
		event(id, "session.idle", map[string]any{"aborted": true})
		result(map[string]any{"success": true})
	case "ping":
		result(map[string]any{"message": "pong"})
	case "session.destroy":
		result(map[string]any{"success": true})
	}
	return true
}

func (w *faultWire) send(m any) {
	b := encodeFrame(m)
	w.answer = append(w.answer, b...)
	w.sent += len(b)
}

// delivered returns the ids of the session's events that the client could read whole.
func (w *faultWire) delivered(session string) (ids []string) {
	for _, e := range w.events[session] {
		if e.end <= w.read {
			ids = append(ids, e.id)
		}
	}
	return ids
}

// faultTalk has the whole conversation over the wire, goes on after the first failure, and returns what was wrong: an error out of bounds, an event
// too many or too few, a call that did not return. cause is the error that the fault must show as, nil when everything must succeed.
func faultTalk(w *faultWire, cause error) (wrong []string) {
	complain := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	failed := false
	// check takes the outcome of each call before the stop: once one has failed with the cause, all do.
	check := func(what string, err error) {
		switch {
		case err == nil && !failed:
		case err == nil:
			complain("%s succeeded after the failure", what)
		case cause == nil || !errors.Is(err, cause):
			complain("%s: %v", what, err)
		default:
			failed = true
		}
	}
	c, err := NewClient(ctx, w, nil)
	check("NewClient", err)
	if err != nil {
		return wrong
	}
	tool := Tool{Name: "t", Handler: func(context.Context, ToolCall) (ToolResult, error) { return ToolResult{Text: "<x>"}, nil }}
	ids, subs, sessions := []string{"a", "b"}, make([]*Subscription[Event], 2), make([]*Session, 2)
	for i, id := range ids {
		p, err := c.PrepareSession(&SessionConfig{SessionID: id, Tools: []Tool{tool}})
		if err != nil {
			complain("PrepareSession: %v", err)
			return wrong
		}
		subs[i] = p.Subscribe()
		sessions[i], err = p.Start(ctx)
		check("Start", err)
	}
	if a := sessions[0]; a != nil {
		last, err := a.SendAndWait(ctx, Message{Prompt: "tool"})
		check("SendAndWait", err)
		if err == nil && (last == nil || last.Content != "dönε") {
			complain("answered %+v", last)
		}
		ends := 0
		for e, err := range a.Ask(ctx, Message{Prompt: "abort"}) {
			switch {
			case err != nil && !errors.Is(err, ErrAborted):
				check("Ask", err)
				fallthrough
			case err != nil:
				ends++
			case ends > 0:
				complain("Ask yields after its end")
			case e.Type == EventAssistantMessageDelta:
				check("Abort", a.Abort(ctx))
			}
		}
		if ends != 1 {
			complain("Ask ended %d times", ends)
		}
		check("Disconnect", a.Disconnect(ctx))
	}
	_, err = c.Ping(ctx, "")
	check("Ping", err)
	broken := failed
	if err := c.Stop(ctx); err != nil && (cause == nil || broken || !errors.Is(err, ErrNotConfirmed)) {
		complain("Stop: %v", err)
	}
	select {
	case <-c.Done():
	case <-ctx.Done():
		complain("no end")
		return wrong
	}
	end := c.Err()
	if !errors.Is(end, ErrClosed) && (cause == nil || !errors.Is(end, cause)) || broken && errors.Is(end, ErrClosed) {
		complain("ended with %v", end)
	}
	if _, err := c.Ping(ctx, ""); !errors.Is(err, ErrClosed) {
		complain("Ping after Stop: %v", err)
	}

	w.mu.Lock()
	defer w.mu.Unlock()
	for i, id := range ids {
		var got []string
		var ends []error
		for e, err := range subs[i].All(ctx) {
			if err != nil {
				ends = append(ends, err)
			} else {
				got = append(got, e.ID)
			}
		}
		if want := w.delivered(id); !slices.Equal(got, want) {
			complain("events of %s: got %q, want %q", id, got, want)
		}
		clean := sessions[i] != nil && errors.Is(context.Cause(sessions[i].Context()), ErrClosed)
		if clean && len(ends) != 0 || !clean && (len(ends) != 1 || cause == nil || !errors.Is(ends[0], cause)) {
			complain("the sequence of %s ended with %v", id, ends)
		}
		if sessions[i] != nil && context.Cause(sessions[i].Context()) == nil {
			complain("%s has not ended", id)
		}
	}
	return wrong
}

// faultRun has the conversation with one fault and checks that nothing of it is left.
func faultRun(t *testing.T, p faultPlan, cause error, row string) {
	t.Helper()
	before := runtime.NumGoroutine()
	w := newFaultWire(p)
	if wrong := faultTalk(w, cause); wrong != nil {
		t.Errorf("%s: %s", row, strings.Join(wrong, "\n\t"))
	}
	deadline := time.Now().Add(patience)
	for runtime.NumGoroutine() > before {
		if time.Now().After(deadline) {
			t.Fatalf("%s: goroutines are left", row)
		}
		runtime.Gosched()
	}
}

// faultRecord has the conversation without a fault.
func faultRecord(t *testing.T) *faultWire {
	t.Helper()
	w := newFaultWire(noFault)
	if wrong := faultTalk(w, nil); wrong != nil {
		t.Fatal(strings.Join(wrong, "\n"))
	}
	if w.read != w.sent || len(w.events["a"]) < 9 || len(w.events["b"]) < 3 {
		t.Fatalf("read %d of %d bytes, %d and %d events", w.read, w.sent, len(w.events["a"]), len(w.events["b"]))
	}
	return w
}

// TestCutEverywhere has one conversation again and again: handshake, two sessions, a turn with a tool, an aborted turn, a disconnect, a stop. Each
// time the connection is cut after another byte, in the next of several ways.
func TestCutEverywhere(t *testing.T) {
	leakCheck(t)
	whole := faultRecord(t)
	stride := 1
	if testing.Short() {
		stride = 7 // no multiple of the number of ways
	}
	toClient := []struct {
		name    string
		readErr error
		eager   bool
		cause   error
	}{
		{"EOF", io.EOF, false, io.ErrUnexpectedEOF},
		{"EOF with data", io.EOF, true, io.ErrUnexpectedEOF},
		{"error", errFault, false, errFault},
	}
	for n := 0; n < whole.sent; n += stride {
		p, way := noFault, toClient[n%len(toClient)]
		p.in, p.readErr, p.eager = n, way.readErr, way.eager
		faultRun(t, p, way.cause, fmt.Sprintf("%s after %d of %d bytes to the client", way.name, n, whole.sent))
	}
	toServer := []struct {
		name    string
		readErr error
		lost    bool
		cause   error
	}{
		{"EOF", io.EOF, false, io.ErrUnexpectedEOF},
		{"error", errFault, false, errFault},
		{"EOF, writes into the void", io.EOF, true, io.ErrUnexpectedEOF},
	}
	for n := 0; n < whole.written; n += stride {
		p, way := noFault, toServer[n%len(toServer)]
		p.out, p.readErr, p.lost = n, way.readErr, way.lost
		faultRun(t, p, way.cause, fmt.Sprintf("%s after %d of %d bytes to the server", way.name, n, whole.written))
	}
}

// TestSplitEverywhere has the same conversation with each read ended at each offset, and with each write taken in parts: that changes nothing.
func TestSplitEverywhere(t *testing.T) {
	leakCheck(t)
	whole := faultRecord(t)
	for n := range faultStep {
		p := noFault
		p.split = n
		faultRun(t, p, nil, fmt.Sprintf("reads end after %d bytes and each further %d", n, faultStep))
	}
	for n := 1; n <= 64; n++ {
		p := noFault
		p.chunk = n
		faultRun(t, p, nil, fmt.Sprintf("reads of %d bytes", n))
	}
	p := noFault
	p.dribs = true
	faultRun(t, p, nil, "writes of one byte")
	p.chunk = 1
	faultRun(t, p, nil, "reads and writes of one byte")
	for k, size := range whole.writes {
		for keep := 1; keep < size; keep += 1 + keep/2 {
			p := noFault
			p.write, p.keep, p.silent = k, keep, true
			faultRun(t, p, nil, fmt.Sprintf("write %d lacks %d bytes", k, keep))
		}
	}
}

// TestEveryWriteFails fails each write once, after none, some and all of its bytes, while the server stays.
func TestEveryWriteFails(t *testing.T) {
	leakCheck(t)
	whole := faultRecord(t)
	var rows sync.WaitGroup // all at once: each waits a while for a better reason than its own
	for k, size := range whole.writes {
		for _, keep := range []int{size, size - 1, size / 2, 1, 0} {
			rows.Add(1)
			go func() { // ends with its conversation; awaited below
				defer rows.Done()
				p := noFault
				p.write, p.keep = k, keep
				if wrong := faultTalk(newFaultWire(p), errFault); wrong != nil {
					t.Errorf("write %d fails %d bytes before its end: %s", k, keep, strings.Join(wrong, "\n\t"))
				}
			}()
		}
	}
	rows.Wait()
	for k := range whole.writes { // a writer that makes no progress
		p := noFault
		p.write, p.keep, p.silent = k, -1, true
		rows.Add(1)
		go func() { // as above
			defer rows.Done()
			if wrong := faultTalk(newFaultWire(p), io.ErrShortWrite); wrong != nil {
				t.Errorf("write %d takes nothing: %s", k, strings.Join(wrong, "\n\t"))
			}
		}()
	}
	rows.Wait()
}

// TestDisconnectMeetsTheCut: a session that has lost its route to the end of the connection, but has not been ended by that yet, is not released.
func TestDisconnectMeetsTheCut(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	s.mu.Lock() // which its end waits for
	p.conn.Close()
	until(t, "the route's end", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.routes) == 0
	})
	err := s.Disconnect(testContext(t))
	s.mu.Unlock()
	var of *SessionError
	if !errors.Is(err, io.ErrUnexpectedEOF) || !errors.As(err, &of) || of.SessionID != s.ID() {
		t.Errorf("got %v", err)
	}
}

// TestAnyOrder has the server send what does not depend on each other in every order: answers to concurrent calls, events of two sessions, a question.
// Each arrives where it belongs, and no answer before the events that stood before it.
func TestAnyOrder(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	sessions := []*Session{createSession(t, c, &SessionConfig{SessionID: "a"}), createSession(t, c, &SessionConfig{SessionID: "b"})}
	subs := []*Subscription[Event]{sessions[0].Subscribe(), sessions[1].Subscribe()}
	held := make(chan peerMessage, 3)
	p.handle("work", func(_ *peer, m peerMessage) any { held <- m; return noAnswer })

	sent := [2]uint64{} // events so far
	try := func(order []byte) {
		expected := make(map[byte][2]uint64) // what must have been published when an answer is handed over
		var seen sync.Map
		var calls []<-chan error
		for _, name := range []byte("xyz") {
			calls = append(calls, async(func() error {
				raw, err := c.call(testContext(t), "work", map[string]byte{"n": name}, func(json.RawMessage, error) {
					seen.Store(name, [2]uint64{sessions[0].ring.position(), sessions[1].ring.position()})
				})
				if err != nil || string(raw) != fmt.Sprint(name) {
					return fmt.Errorf("%c got %s, %v", name, raw, err)
				}
				return nil
			}))
		}
		requests := make(map[byte]peerMessage)
		for range calls {
			m := await(t, "call", held)
			requests[byte(m.get("n").(float64))] = m
		}
		var out []any
		answer := make(chan peerMessage, 1)
		var events [2][]string
		for _, what := range order {
			switch what {
			case 'q':
				p.mu.Lock()
				p.answers[`"q"`] = answer
				p.mu.Unlock()
				out = append(out, map[string]any{"id": "q", "method": "future.question"})
			case '0', '1':
				n := what - '0'
				sent[n]++
				id := fmt.Sprint("e", sent[n])
				events[n] = append(events[n], id)
				out = append(out, notification("session.event", map[string]any{"sessionId": sessions[n].ID(), "event": map[string]any{"id": id, "type": "x"}}))
			default:
				out = append(out, map[string]any{"id": requests[what].ID, "result": what})
				expected[what] = sent
			}
		}
		p.send(out...)
		for _, call := range calls {
			if err := await(t, "call", call); err != nil {
				t.Errorf("%s: %v", order, err)
			}
		}
		if m := await(t, "answer", answer); m.Error == nil || m.Error.Code != codeMethodNotFound {
			t.Errorf("%s: answered %s", order, m.Result)
		}
		p.sync()
		for name, want := range expected {
			if got, _ := seen.Load(name); got != want {
				t.Errorf("%s: with %c, %v events were there, want %v", order, name, got, want)
			}
		}
		for n, sub := range subs {
			var got []string
			for {
				e, ready, _ := sub.poll()
				if !ready {
					break
				}
				got = append(got, e.ID)
			}
			if !slices.Equal(got, events[n]) {
				t.Errorf("%s: session %d got %q, want %q", order, n, got, events[n])
			}
		}
	}
	n := 0
	var permute func(order, rest []byte)
	permute = func(order, rest []byte) {
		if len(rest) == 0 {
			if n++; !testing.Short() || n%7 == 0 {
				try(order)
			}
			return
		}
		for i, b := range rest {
			if bytes.IndexByte(rest[:i], b) < 0 { // one of two equals
				permute(append(order[:len(order):len(order)], b), slices.Delete(slices.Clone(rest), i, i+1))
			}
		}
	}
	permute(nil, []byte("xyz001q"))
}

// TestDeepNesting: no depth of what either side gives exhausts the stack.
func TestDeepNesting(t *testing.T) {
	leakCheck(t)
	deep := func(n int) string { return strings.Repeat(`{"a":[`, n/2) + strings.Repeat(`]}`, n/2) }
	endless := deep(100_000)
	for _, body := range []string{
		`%s`, `{"a":%s}`, `{"id":%s,"method":"x"}`, `{"id":1,"method":%s}`, `{"id":1,"result":%s}`, `{"id":1,"error":{"data":%s}}`, `{"method":"x","params":%s}`,
		`{"method":"session.event","params":{"sessionId":%s}}`, `{"method":"session.event","params":{"sessionId":"s","event":%s}}`,
		`{"method":"session.event","params":{"sessionId":"s","event":{"type":"session.idle","data":%s}}}`,
	} {
		for _, text := range []string{endless, endless[:len(endless)/2], strings.Repeat("[", 1_000_000)} {
			c, p := newPeer(t, nil)
			createSession(t, c, &SessionConfig{SessionID: "s"})
			p.raw([]byte(spineFrame(fmt.Sprintf(body, text))))
			await(t, "client's end", c.Done())
			var broken *FrameError
			if err := c.Err(); !errors.As(err, &broken) {
				t.Errorf("%s: ended with %v", body, err)
			}
		}
	}

	var e Event
	if err := e.UnmarshalJSON([]byte(`{"type":"x","data":` + endless + `}`)); err == nil {
		t.Error("an event was decoded")
	}
	e = Event{Type: EventAssistantMessage, Data: json.RawMessage(endless)}
	if p, ok := e.Payload().(*RawPayload); !ok || p.Err == nil {
		t.Errorf("payload is %T", e.Payload())
	}

	raw := json.RawMessage(endless)
	c, p := newPeer(t, &Options{Handlers: map[string]HandlerFunc{"deep": func(context.Context, string, json.RawMessage) (any, error) { return raw, nil }}})
	if _, err := c.PrepareSession(&SessionConfig{Tools: []Tool{{Name: "t", Parameters: raw}}}); !errors.Is(err, ErrInvalidConfig) {
		t.Errorf("a tool's schema: %v", err)
	}
	s := createSession(t, c, &SessionConfig{SessionID: "s"})
	sub := s.Subscribe()
	for name, err := range map[string]error{
		"Client.Call": c.Call(testContext(t), "x", raw, nil), "Session.Call": s.Call(testContext(t), "x", raw, nil),
		"inside": c.Call(testContext(t), "x", map[string]any{"a": raw}, nil),
	} {
		if !errors.Is(err, ErrInvalidConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if m := p.request("deep", nil); m.Error == nil {
		t.Error("a handler's result was sent")
	}
	p.raw([]byte(spineFrame(`{"method":"session.event","params":{"sessionId":"s","event":{"type":"assistant.message","data":` + deep(maxNesting-10) + `}}}`)))
	if e := next(t, sub); len(e.Data) == 0 {
		t.Error("what is within the limit was lost")
	}
}

// TestRepeatedMembers: of members that stand twice the last counts, as a whole. Nothing is put together from both.
func TestRepeatedMembers(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	subs := make(map[string]*Subscription[Event])
	for _, id := range []string{"a", "b"} {
		subs[id] = createSession(t, c, &SessionConfig{SessionID: id}).Subscribe()
	}
	const x, y = `"event":{"type":"x","data":1}`, `"event":{"type":"y"}`
	for _, tt := range []struct{ members, want string }{
		{`"params":{"sessionId":"a","sessionId":"b",` + x + `}`, "b x 1"},
		{`"params":{"sessionId":"a",` + x + `,"session\u0049d":"b"}`, "b x 1"},
		{`"params":{"sessionId":"a",` + x + `,"sessionId":null}`, ""},
		{`"params":{"sessionId":"a",` + x + `,"sessionId":["b"]}`, ""},
		{`"params":{"sessionId":"a",` + x + `,` + y + `}`, "a y "},
		{`"params":{"sessionId":"a",` + x + `,"event":null}`, ""},
		{`"params":{"sessionId":"a",` + x + `},"params":{"sessionId":"b"}`, ""},
		{`"params":{"sessionId":"a",` + x + `},"params":{` + x + `}`, ""},
		{`"params":{"sessionId":"a",` + x + `},"params":[]`, ""},
		{`"params":{"sessionId":"a",` + x + `},"param\u0073":{"sessionId":"b",` + y + `}`, "b y "},
		{`"params":{"sessionId":"a",` + x + `},"method":"x"`, ""},
		{`"params":{"sessionId":"a","event":{"type":"x","type":"y","data":1,"data":{"n":2}}}`, `a y {"n":2}`},
	} {
		p.raw([]byte(spineFrame(`{"method":"session.event",` + tt.members + `}`)))
		p.sync()
		got := ""
		for id, sub := range subs {
			if e, ready, _ := sub.poll(); ready {
				got += fmt.Sprintf("%s %s %s", id, e.Type, e.Data)
			}
		}
		if got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.members, got, tt.want)
		}
	}
	answer := make(chan peerMessage, 1)
	p.mu.Lock()
	p.answers[`"second"`] = answer
	p.mu.Unlock()
	p.raw([]byte(spineFrame(`{"id":"first","id":"second","method":"future.method"}`)))
	await(t, "answer", answer)
}

// TestOddTexts has the server use texts that are no UTF-8, or no Unicode, wherever it can name or say something: nothing is lost or taken for
// something else, and what names a request comes back as it was spelled.
func TestOddTexts(t *testing.T) {
	leakCheck(t)
	odd := []string{`"\ud800"`, `"\ud801"`, `"\udc00\ud800"`, "\"\xff\"", "\"\xfe\"", "\"\xed\xa0\x80\"", `"\ufffd"`, `"\u0000"`, "\"\u2028<&>\"", `"\"\\\/"`}
	calls := make(chan ToolCall, len(odd))
	exchanges := make(chan struct{}, len(odd))
	c, p := newPeer(t, &Options{ModelTransport: roundTripper(func(*http.Request) (*http.Response, error) {
		exchanges <- struct{}{}
		return nil, errors.New("no model")
	})})
	s := createSession(t, c, &SessionConfig{SessionID: "s", OnPermission: ApproveAll, Tools: []Tool{{Name: "t", Handler: func(_ context.Context, call ToolCall) (ToolResult, error) {
		calls <- call
		return ToolResult{}, nil
	}}}})
	sub := s.Subscribe()
	expectSpelling := func(method string, n int) {
		t.Helper()
		p.wait(method, n)
		var got []string
		for _, m := range p.calls(method) {
			got = append(got, string(member(m.Params, "requestId")))
		}
		want := slices.Clone(odd[:n])
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s answers %q, want %q", method, got, want)
		}
	}
	event := func(typ, data string) {
		p.raw([]byte(spineFrame(`{"method":"session.event","params":{"sessionId":"s","event":{"type":` + typ + `,"id":` + typ + `,"agentId":` + typ + `,"data":` + data + `}}}`)))
	}
	for _, text := range odd {
		event(text, `{"a":`+text+`}`)
		if e := next(t, sub); string(e.Data) != `{"a":`+text+`}` || e.Type != EventType(unquote([]byte(text))) {
			t.Errorf("%s: came as %q with %s", text, e.Type, e.Data)
		}
		for range 2 { // the second is a repetition
			p.raw([]byte(spineFrame(`{"method":"session.event","params":{"sessionId":"s","event":{"type":"external_tool.requested","data":{"requestId":` + text + `,"toolName":"t","toolCallId":"c","arguments":{"a":` + text + `}}}}}`)))
			next(t, sub)
		}
		if call := await(t, "tool for "+text, calls); string(call.Arguments) != `{"a":`+text+`}` {
			t.Errorf("%s: called with %s", text, call.Arguments)
		}
		p.raw([]byte(spineFrame(`{"method":"session.event","params":{"sessionId":"s","event":{"type":"permission.requested","data":{"requestId":` + text + `,"permissionRequest":{"kind":"shell","fullCommandText":` + text + `}}}}}`)))
		next(t, sub)
		p.raw([]byte(spineFrame(`{"method":"session.event","params":{"sessionId":"s","event":{"type":"external_tool.requested","data":{"requestId":"r","toolName":` + text + `,"toolCallId":` + text + `}}}}`)))
		next(t, sub)
		p.raw([]byte(spineFrame(`{"method":"session.event","params":{"sessionId":` + text + `,"event":{"type":"x"}}}`))) // of nobody

		answer := make(chan peerMessage, 1)
		p.mu.Lock()
		p.answers[text] = answer
		p.mu.Unlock()
		p.raw([]byte(spineFrame(`{"id":` + text + `,"method":` + text + `,"params":{"sessionId":` + text + `}}`)))
		await(t, "answer to "+text, answer)

		p.handle("refuse", func(_ *peer, m peerMessage) any {
			p.raw([]byte(spineFrame(`{"id":` + string(m.ID) + `,"error":{"code":7,"message":` + text + `,"data":` + text + `}}`)))
			return noAnswer
		})
		var refused *RPCError
		if err := c.Call(testContext(t), "refuse", nil, nil); !errors.As(err, &refused) || refused.Code != 7 || string(refused.Data) != text || refused.Error() == "" {
			t.Errorf("%s: refused with %v", text, err)
		}

		p.raw([]byte(spineFrame(`{"id":"m","method":"llmInference.httpRequestStart","params":{"requestId":` + text + `,"method":"GET","url":"http://m.invalid/","headers":{}}}`)))
		p.raw([]byte(spineFrame(`{"id":"m","method":"llmInference.httpRequestChunk","params":{"requestId":` + text + `,"data":"","end":true}}`)))
		await(t, "exchange "+text, exchanges)
	}
	expectSpelling(hdlTool, len(odd))
	expectSpelling(hdlPermission, len(odd))
	expectSpelling("llmInference.httpResponseStart", len(odd))
	if _, ready, err := sub.poll(); ready || err != nil {
		t.Errorf("one event too many, %v", err)
	}
}

// TestTokensStayWithTheCLI: what a launched CLI gets in its environment is not put into the host's, where every other child would find it.
func TestTokensStayWithTheCLI(t *testing.T) {
	leakCheck(t)
	before := os.Environ()
	o := spineOptions(t, spineScript{TCP: true})
	o.GitHubToken, o.ConnectionToken, o.BaseDir = "ghs_fault", "conn_fault", t.TempDir()
	c := spineStart(t, o)
	if cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", c.PID())); err == nil && bytes.Contains(cmdline, []byte("_fault")) {
		t.Errorf("the child's arguments are %q", cmdline)
	}
	if after := os.Environ(); !slices.Equal(before, after) {
		t.Error("the host's environment has changed")
	}
	if err := c.Stop(testContext(t)); err != nil {
		t.Error(err)
	}
	if after := os.Environ(); !slices.Equal(before, after) {
		t.Error("the host's environment has changed")
	}
}

// TestDirFSModes: the server decides who may read a file, but nothing beyond that: no set-user-id bit, whatever number it sends.
func TestDirFSModes(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("no modes here")
	}
	leakCheck(t)
	dir := t.TempDir()
	c, p := newPeer(t, &Options{SessionFS: &SessionFSConfig{InitialCWD: "/", StatePath: "/state"}})
	createSession(t, c, &SessionConfig{SessionID: "s", SessionFS: DirFS(dir)})
	for i, mode := range []uint32{0o600, 0o7600, 1<<23 | 1<<31 | 0o600} { // the last two as the system and as package fs spell such bits
		p.request("sessionFs.writeFile", map[string]any{"sessionId": "s", "path": fmt.Sprint("/f", i), "content": "x", "mode": mode})
		p.request("sessionFs.mkdir", map[string]any{"sessionId": "s", "path": fmt.Sprint("/d", i), "mode": mode | 0o100})
		for name, want := range map[string]os.FileMode{fmt.Sprint("f", i): 0o600, fmt.Sprint("d", i): os.ModeDir | 0o700} {
			if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode() != want {
				t.Errorf("mode %o of %s: got %v, %v", mode, name, info, err)
			}
		}
	}
}

// TestTinyFrames: frames that say nothing cost nothing that stays, however many come.
func TestTinyFrames(t *testing.T) {
	leakCheck(t)
	_, p := newPeer(t, &Options{Logger: slog.New(slog.NewTextHandler(io.Discard, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	held := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	goroutines, heap := runtime.NumGoroutine(), held()
	const n = 1 << 15
	for _, body := range []string{`{}`, `7`, `{"method":"x"}`, `{"id":1,"result":0}`, `{"method":"session.event","params":{"sessionId":"none","event":{}}}`} {
		p.raw(bytes.Repeat([]byte(spineFrame(body)), n))
	}
	p.sync()
	if now := runtime.NumGoroutine(); now > goroutines+1 { // the log's
		t.Errorf("%d goroutines were %d", now, goroutines)
	}
	if now := held(); now > heap+4<<20 {
		t.Errorf("%d bytes are held, there were %d", now, heap)
	}
}

// A matrix is what a row of TestRealMatrix has: a client that all rows share, a model of its own, and the time that a slow machine needs.
type matrix struct {
	*testing.T
	ctx    context.Context
	client *Client
	model  *modelServer
}

func (m matrix) must(err error) {
	m.Helper()
	if err != nil {
		m.Fatal(err)
	}
}

func (m matrix) want(what string, got, want any) {
	m.Helper()
	if !reflect.DeepEqual(got, want) {
		m.Errorf("%s: got %v, want %v", what, got, want)
	}
}

func (m matrix) contains(what, text string, parts ...string) {
	m.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			m.Errorf("%s: no %q in %q", what, part, text)
		}
	}
}

// config completes a row's configuration.
func (m matrix) config(cfg SessionConfig) *SessionConfig {
	if cfg.WorkingDirectory == "" {
		cfg.WorkingDirectory = m.TempDir()
	}
	p := hostProvider(m.model)
	if cfg.Provider != nil {
		p.MaxPromptTokens = cfg.Provider.MaxPromptTokens
	}
	cfg.Model, cfg.Provider = "fake-model", p
	return &cfg
}

// create creates a session that is released at the row's end.
func (m matrix) create(c *Client, cfg SessionConfig) *Session {
	m.Helper()
	s, err := c.CreateSession(m.ctx, m.config(cfg))
	m.must(err)
	m.Cleanup(func() {
		if err := s.Disconnect(m.ctx); err != nil && c.Err() == nil {
			m.Errorf("disconnect: %v", err)
		}
	})
	return s
}

// matrixAwait is await with the row's patience.
func matrixAwait[T any](m matrix, what string, c <-chan T) (v T) {
	m.Helper()
	select {
	case v = <-c:
	case <-m.ctx.Done():
		m.Fatalf("%s: %v", what, m.ctx.Err())
	}
	return v
}

// until reads events up to the main agent's next one of a type.
func (m matrix) until(sub *Subscription[Event], typ EventType) (events []Event) {
	m.Helper()
	for {
		e, err := sub.Next(m.ctx)
		if err != nil {
			m.Fatalf("waiting for %s: %v", typ, err)
		}
		if events = append(events, e); e.Type == typ && e.AgentID == "" {
			return events
		}
	}
}

// A matrixTurn is what came of a message.
type matrixTurn struct {
	text     string // the main agent's last message
	err      error
	events   []Event
	requests []matrixRequest // what the model was asked
}

// try sends a message and waits for its end.
func (m matrix) try(s *Session, msg Message) (turn matrixTurn) {
	m.Helper()
	before := len(m.model.Requests())
	for e, err := range s.Ask(m.ctx, msg) {
		if turn.err = err; err != nil {
			break
		}
		turn.events = append(turn.events, e)
		if a, ok := e.Payload().(*AssistantMessage); ok && e.AgentID == "" {
			turn.text = a.Content
		}
	}
	turn.requests = m.requests()[before:]
	return turn
}

// turn is try where nothing may go wrong and the answer is known.
func (m matrix) turn(s *Session, prompt, answer string) matrixTurn {
	m.Helper()
	turn := m.try(s, Message{Prompt: prompt})
	m.must(turn.err)
	if turn.text != answer {
		m.Errorf("the answer to %.80q is %.200q, want %.200q", prompt, turn.text, answer)
	}
	return turn
}

// A matrixRequest is a question to the model as the model sees it.
type matrixRequest struct {
	Model           string
	Stream          bool
	ReasoningEffort string `json:"reasoning_effort"`
	Messages        []modelMessage
	Tools           []struct {
		Function struct{ Name, Description string }
	}
	body string
}

func (m matrix) requests() (all []matrixRequest) {
	m.Helper()
	for _, r := range m.model.Requests() {
		q := matrixRequest{body: string(r.Body)}
		m.must(json.Unmarshal(r.Body, &q))
		all = append(all, q)
	}
	return all
}

func (r matrixRequest) tools() (names []string) {
	for _, t := range r.Tools {
		names = append(names, t.Function.Name)
	}
	return names
}

// text returns all that one role says in the request.
func (r matrixRequest) text(role string) string {
	var parts []string
	for _, m := range r.Messages {
		if m.Role == role {
			parts = append(parts, m.Text)
		}
	}
	return strings.Join(parts, "\n")
}

// matrixPayloads are the payloads of one type, those of one kind of agent: the main one or the others.
func matrixPayloads[P Payload](events []Event, main bool) (found []P) {
	for _, e := range events {
		if p, ok := e.Payload().(P); ok && (e.AgentID == "") == main {
			found = append(found, p)
		}
	}
	return found
}

// matrixOne is matrixPayloads of the main agent where there must be exactly one.
func matrixOne[P Payload](m matrix, events []Event) (one P) {
	m.Helper()
	found := matrixPayloads[P](events, true)
	if len(found) != 1 {
		m.Fatalf("%d payloads of type %T", len(found), one)
	}
	return found[0]
}

// fails has the model fail until the CLI gives up, and after that answer again.
func (m matrix) fails(script string, tries int, retry string, want AgentError) {
	s := m.create(m.client, SessionConfig{Streaming: true})
	turn := m.try(s, Message{Prompt: script})
	var failed *AgentError
	if !errors.As(turn.err, &failed) {
		m.Fatalf("got %v, want an AgentError", turn.err)
	}
	m.want("the error", AgentError{Type: failed.Type, StatusCode: failed.StatusCode}, want)
	m.want("is one of authentication", errors.Is(turn.err, ErrAuthentication), want.StatusCode == 401)
	m.want("requests", len(turn.requests), tries)
	reported := matrixOne[*SessionErrorEvent](m, turn.events)
	m.want("the event's words and code", AgentError{Message: reported.Message, StatusCode: reported.StatusCode}, AgentError{Message: failed.Message, StatusCode: failed.StatusCode})
	retries, partial := 0, make(map[string]string)
	for _, e := range turn.events {
		if e.Type == EventAssistantTurnRetry {
			m.want("the reason for a retry", unquote(member(e.Data, "reason")), retry)
			retries++
		}
	}
	for _, d := range matrixPayloads[*AssistantMessageDelta](turn.events, true) {
		partial[d.MessageID] += d.DeltaContent
	}
	m.want("retries", retries, tries-1)
	// Each try streams anew, as a message of its own; none becomes a whole message.
	if strings.HasPrefix(script, "cut") {
		m.want("messages begun", len(partial), tries)
		for _, text := range partial {
			m.want("a message begun", text, "one ")
		}
	}
	m.want("whole messages", len(matrixPayloads[*AssistantMessage](turn.events, true)), 0)
	m.turn(s, "say: recovered", "recovered")
}

// converse takes a session through its life. Nothing of what the server stores was missing from the events, nor out of order.
func (m matrix) converse(c *Client) {
	p, err := c.PrepareSession(m.config(SessionConfig{Streaming: true, OnPermission: ApproveAll}))
	m.must(err)
	sub := p.Subscribe()
	s, err := p.Start(m.ctx)
	m.must(err)
	m.turn(s, "say: hello", "hello")
	turn := m.turn(s, `call: glob {"pattern":"*"}`, "tool said: No files matched the pattern.")
	m.want("the tool succeeded", matrixOne[*ToolExecutionComplete](m, turn.events).Success, true)
	history, err := s.History(m.ctx)
	m.must(err)
	info, err := c.SessionInfo(m.ctx, s.ID())
	m.must(err)
	m.want("the session is known", info != nil, true)
	m.must(s.Disconnect(m.ctx))
	names := func(events []Event) (names []string) {
		for _, e := range events {
			if !e.Ephemeral {
				names = append(names, string(e.Type)+" "+e.ID)
			}
		}
		return names
	}
	var events []Event
	for e, err := range sub.All(m.ctx) {
		m.must(err)
		events = append(events, e)
	}
	all, stored := names(events), names(history)
	m.want("history and events", stored, all[:min(len(stored), len(all))])
	m.want("events of the release", len(matrixPayloads[*SessionShutdown](events, true)), 1)
}

// resume resumes a session that had these prompts, and returns what the resume event says.
func (m matrix) resume(c *Client, id, prompts string) *SessionResume {
	m.Helper()
	p, err := c.PrepareResumeSession(id, m.config(SessionConfig{}))
	m.must(err)
	sub := p.Subscribe()
	s, err := p.Start(m.ctx)
	m.must(err)
	m.turn(s, "history", prompts)
	m.must(s.Disconnect(m.ctx))
	return matrixOne[*SessionResume](m, m.until(sub, EventSessionResume))
}

// TestRealMatrix takes the real CLI through what a session can be and meet, a row a scenario. Tests of their own have: tools and the
// ways in which they fail, permissions, questions, single hooks, transforms, commands, abort (TestRealHandlers), forms of the host
// (TestRealElicitation), a call that is pending at a kill (TestRealPendingTool), single requests (TestRealHelpers).
func TestRealMatrix(t *testing.T) {
	mark := fmt.Sprintf("matrix.%d.%d", os.Getpid(), time.Now().UnixNano())
	if runtime.GOOS == "linux" {
		procLeakCheck(t, "PROC_MARK="+mark)
	} else {
		leakCheck(t)
	}
	t.Setenv("PROC_MARK", mark)
	client := startReal(t, Options{})
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	helper := CustomAgent{Name: "helper", DisplayName: "Helper", Description: "helps", Prompt: "You are the helper.", Tools: []string{"view"}} // may only look
	rows := []struct {
		name string
		run  func(m matrix)
	}{
		// The CLI waits between its tries: first, so that the others run beside them.
		{"model answers 500", func(m matrix) { m.fails("status: 500", 6, "api_error", AgentError{Type: "query", StatusCode: 500}) }},
		{"model cuts its stream", func(m matrix) { m.fails("cut: one two", 6, "streaming_error", AgentError{Type: "query"}) }},
		{"model answers 401", func(m matrix) {
			m.fails("status: 401", 3, "transient_auth_error", AgentError{Type: "authentication", StatusCode: 401})
		}},
		{"no login", func(m matrix) { // a session is accepted; its first turn reports
			s, err := m.client.CreateSession(m.ctx, &SessionConfig{WorkingDirectory: m.TempDir()})
			m.must(err)
			turn := m.try(s, Message{Prompt: "hello"})
			m.want("ErrAuthentication", errors.Is(turn.err, ErrAuthentication), true)
			m.must(s.Disconnect(m.ctx))
		}},

		{"stdio", func(m matrix) { m.converse(m.client) }},
		{"TCP and Dial", func(m matrix) {
			const token = "a token of ours"
			server := startReal(m.T, Options{Transport: TCP, ConnectionToken: token})
			m.converse(server)
			addr := server.conn.rwc.(net.Conn).RemoteAddr().String()
			var refused *RPCError
			if _, err := Dial(m.ctx, addr, &Options{ConnectionToken: "another"}); !errors.As(err, &refused) || refused.Method != "connect" {
				m.Errorf("a wrong token: %v", err)
			}
			guest, err := Dial(m.ctx, addr, &Options{ConnectionToken: token})
			m.must(err)
			m.want("the guest's process", guest.PID(), 0)
			m.want("the guest's server", guest.Server(), server.Server())
			m.converse(guest)
			m.must(guest.Stop(m.ctx))
			_, err = server.Ping(m.ctx, "")
			m.want("the server after its guest has left", err, nil)
		}},

		{"no tools", func(m matrix) {
			s := m.create(m.client, SessionConfig{AvailableTools: []string{}})
			turn := m.turn(s, `call: view {"path":"/"}`, "tool said: Tool 'view' does not exist. Available tools that can be called are .")
			m.want("tools", turn.requests[0].tools(), []string(nil))
			m.want("a call", matrixOne[*ToolExecutionComplete](m, turn.events).Success, false)
		}},
		{"available tools", func(m matrix) {
			s := m.create(m.client, SessionConfig{
				AvailableTools: []string{"builtin:view", "grep", "custom:*"},
				ExcludedTools:  []string{"other"}, // wins
				Tools:          []Tool{{Name: "mine"}, {Name: "other"}},
			})
			m.want("for the model", m.turn(s, "say: hi", "hi").requests[0].tools(), []string{"view", "grep", "mine"})
			infos, err := s.Tools(m.ctx)
			m.must(err)
			var names []string
			for _, info := range infos {
				names = append(names, info.Name)
			}
			m.want("listed", names, []string{"view", "grep", "mine"})
		}},
		{"excluded tools", func(m matrix) {
			all := m.turn(m.create(m.client, SessionConfig{}), "say: hi", "hi").requests[0].tools()
			some := m.turn(m.create(m.client, SessionConfig{ExcludedTools: []string{"view", "builtin:grep"}}), "say: hi", "hi").requests[0].tools()
			rest := slices.DeleteFunc(slices.Clone(all), func(name string) bool { return name == "view" || name == "grep" })
			m.want("excluded", len(all)-len(rest), 2)
			m.want("tools", some, rest)
		}},
		{"tool in place of a built-in", func(m matrix) {
			mine := NewTool("view", "my own view", func(_ context.Context, in struct{ Path string }) (string, error) { return "seen " + in.Path, nil })
			mine.SkipPermission = true
			// Without a word of it, no turn begins.
			turn := m.try(m.create(m.client, SessionConfig{Tools: []Tool{mine}}), Message{Prompt: "say: hi"})
			var failed *AgentError
			m.want("is an AgentError", errors.As(turn.err, &failed), true)
			m.want("requests", len(turn.requests), 0)
			mine.OverridesBuiltIn = true
			turn = m.turn(m.create(m.client, SessionConfig{Tools: []Tool{mine}}), `call: view {"Path":"/x"}`, "tool said: seen /x")
			var described []string
			for _, tool := range turn.requests[0].Tools {
				if tool.Function.Name == "view" {
					described = append(described, tool.Function.Description)
				}
			}
			m.want("view", described, []string{"my own view"})
		}},
		{"MCP server over stdio", func(m matrix) {
			asked, forms := make(chan PermissionRequest, 3), make(chan ElicitationRequest, 1)
			s := m.create(m.client, SessionConfig{
				MCPServers: map[string]MCPServerConfig{
					"none": {Command: self + "-none"},
					"tiny": {Command: self, Env: map[string]string{"COPILOT_TEST_CHILD": "mcp", "GORACE": "atexit_sleep_ms=0", "TINY": "a value", "PROC_MARK": mark}, Tools: []string{"echo", "fail", "ask"}},
				},
				OnPermission: func(_ context.Context, r PermissionRequest) (PermissionDecision, error) {
					asked <- r
					return ApproveOnce(), nil
				},
				OnElicitation: func(_ context.Context, r ElicitationRequest) (ElicitationResult, error) {
					forms <- r
					return ElicitationResult{ElicitationAccept, map[string]any{"colour": "green"}}, nil
				},
			})
			servers, err := s.MCPServers(m.ctx) // answered when all have started
			m.must(err)
			status := make(map[string]MCPServerStatus)
			for _, server := range servers {
				status[server.Name] = server.Status
			}
			m.want("servers", status, map[string]MCPServerStatus{"none": MCPFailed, "tiny": MCPConnected})

			turn := m.turn(s, `call: tiny-echo {"text":"hi"}`, "tool said: hi, a value")
			tools := turn.requests[0].tools()
			m.want("the server's tools", tools[len(tools)-3:], []string{"tiny-ask", "tiny-echo", "tiny-fail"})
			for _, e := range turn.events {
				if start, ok := e.Payload().(*ToolExecutionStart); ok {
					m.want("server and tool", []string{start.MCPServerName, start.MCPToolName, start.MCPTransport}, []string{"tiny", "echo", "stdio"})
				}
			}
			r := matrixAwait(m, "permission", asked)
			m.want("permission", []any{r.Kind, r.ServerName, r.ToolName, string(r.Args)}, []any{PermissionMCP, "tiny", "tiny-echo", `{"text":"hi"}`})

			turn = m.turn(s, `call: tiny-fail {}`, "tool said: MCP server 'tiny': no luck")
			m.want("failure", *matrixOne[*ToolExecutionComplete](m, turn.events).Error, ToolError{Message: "MCP server 'tiny': no luck", Code: "failure"})

			m.turn(s, `call: tiny-ask {}`, "tool said: accept green")
			form := matrixAwait(m, "form", forms)
			m.want("form", []string{form.Source, form.Message}, []string{"tiny", "Which colour?"})
		}},
		{"skills directory", func(m matrix) {
			dir := m.TempDir()
			m.must(os.Mkdir(filepath.Join(dir, "greet"), 0o777))
			m.must(os.WriteFile(filepath.Join(dir, "greet", "SKILL.md"), []byte("---\nname: greet\ndescription: How to greet.\n---\nSay good day.\n"), 0o666))
			for _, disabled := range [][]string{nil, {"greet"}} {
				s := m.create(m.client, SessionConfig{SkillDirectories: []string{dir}, DisabledSkills: disabled, OnPermission: ApproveAll})
				skills, err := s.Skills(m.ctx)
				m.must(err)
				i := slices.IndexFunc(skills, func(k LoadedSkill) bool { return k.Name == "greet" })
				if i < 0 {
					m.Fatalf("skills are %+v", skills)
				}
				m.want("skill", []any{skills[i].Description, skills[i].Source, skills[i].Enabled}, []any{"How to greet.", "custom", disabled == nil})
				turn := m.try(s, Message{Prompt: `call: skill {"skill":"greet"}`})
				m.must(turn.err)
				m.want("the model is told of it", strings.Contains(turn.requests[0].body, "How to greet."), disabled == nil)
				m.want("the model is given it", strings.Contains(turn.requests[len(turn.requests)-1].text("user"), "Say good day."), disabled == nil)
				if disabled == nil {
					k := matrixOne[*SkillInvoked](m, turn.events)
					m.want("invoked", []string{k.Name, k.Trigger, strings.TrimSpace(k.Content)}, []string{"greet", "agent-invoked", "Say good day."})
				}
			}
		}},
		{"custom agent", func(m matrix) {
			s := m.create(m.client, SessionConfig{CustomAgents: []CustomAgent{helper}, Agent: "helper"})
			for _, name := range []string{"helper", ""} {
				m.must(s.SelectAgent(m.ctx, name))
				agent, err := s.Agent(m.ctx)
				m.must(err)
				m.want("active", agent != nil && agent.DisplayName == "Helper", name != "")
				r := m.turn(s, "say: hi", "hi").requests[0]
				m.want("may look", slices.Contains(r.tools(), "view"), true)
				m.want("may edit", slices.Contains(r.tools(), "edit"), name == "")
				m.want("speaks as the helper", strings.Contains(r.text("system"), helper.Prompt), name != "")
			}
		}},
		{"sub-agent", func(m matrix) {
			hooks := make(chan string, 8)
			s := m.create(m.client, SessionConfig{
				Streaming: true, CustomAgents: []CustomAgent{helper}, OnPermission: ApproveAll,
				Hooks: &Hooks{
					SubagentStart: func(_ context.Context, in SubagentStartInput) error { hooks <- "start " + in.AgentName; return nil },
					SubagentStop:  func(_ context.Context, in SubagentStopInput) error { hooks <- "stop " + in.AgentName; return nil },
				},
			})
			turn := m.turn(s, `call: task {"agent_type":"helper","name":"looker","description":"look","prompt":"say: a look","mode":"sync"}`, "tool said: a look")
			var ids []string
			for _, e := range turn.events {
				if e.AgentID != "" && !slices.Contains(ids, e.AgentID) {
					ids = append(ids, e.AgentID)
				}
			}
			m.want("other agents", len(ids), 1)
			started, completed := matrixPayloads[*SubagentStarted](turn.events, false), matrixPayloads[*SubagentCompleted](turn.events, false)
			if len(started) != 1 || len(completed) != 1 {
				m.Fatalf("started %v, completed %v", started, completed)
			}
			call := matrixPayloads[*AssistantMessage](turn.events, true)[0].ToolRequests[0].ToolCallID
			m.want("who began and ended", []string{started[0].AgentName, started[0].ToolCallID, completed[0].ToolCallID}, []string{"helper", call, call})
			for agent, want := range map[bool]string{true: "tool said: a look", false: "a look"} {
				text := ""
				for _, d := range matrixPayloads[*AssistantMessageDelta](turn.events, agent) {
					text += d.DeltaContent
				}
				m.want("deltas", text, want)
			}
			m.want("the helper's request", turn.requests[1].tools(), []string{"view"})
			m.contains("the helper's prompt", turn.requests[1].text("system"), helper.Prompt)
			m.want("hooks", []string{matrixAwait(m, "hook", hooks), matrixAwait(m, "hook", hooks)}, []string{"start helper", "stop helper"})
		}},
		{"sub-agent in the background", func(m matrix) { // holds back the idle, and wakes the main agent at its end
			s := m.create(m.client, SessionConfig{CustomAgents: []CustomAgent{helper}, OnPermission: ApproveAll})
			sub := s.Subscribe()
			answer := make(chan string, 1)
			turn := async(func() error {
				a, err := s.SendAndWait(m.ctx, Message{Prompt: `call: task {"agent_type":"helper","name":"looker","description":"look","prompt":"hold: a look","mode":"background"}`})
				if err == nil {
					answer <- a.Content
				}
				return err
			})
			matrixAwait(m, "the helper's first word", m.model.Held)
			events := m.until(sub, EventAssistantIdle)
			tasks, err := s.Tasks(m.ctx)
			m.must(err)
			if len(tasks) != 1 {
				m.Fatalf("tasks are %+v", tasks)
			}
			m.want("task", []string{tasks[0].DisplayName, tasks[0].Status}, []string{"looker", "running"})
			m.model.Release()
			events = append(events, m.until(sub, EventSessionIdle)...)
			m.must(matrixAwait(m, "turn", turn))
			m.want("the answer, when it was woken", matrixAwait(m, "answer", answer), "no script")
			requests := m.requests()
			m.contains("what it was woken with", requests[len(requests)-1].text("tool"), "a look")
			m.want("ended", len(matrixPayloads[*SubagentCompleted](events, false)), 1)
		}},

		{"system message appended", func(m matrix) {
			plain := m.turn(m.create(m.client, SessionConfig{}), "say: hi", "hi").requests[0].text("system")
			longer := m.turn(m.create(m.client, SessionConfig{SystemMessage: &SystemMessage{Content: "MORE"}}), "say: hi", "hi").requests[0].text("system")
			m.contains("the plain one", plain, "You are ")
			m.contains("the longer one", longer, plain[:100], "MORE")
		}},
		{"system message replaced", func(m matrix) {
			s := m.create(m.client, SessionConfig{SystemMessage: &SystemMessage{Mode: "replace", Content: "Only this."}})
			m.want("system prompt", m.turn(s, "say: hi", "hi").requests[0].text("system"), "Only this.")
		}},
		{"system message customized", func(m matrix) {
			// What the sections are, as far as it is in a line.
			type section struct{ name, line string }
			sections := make(chan section, 2)
			cfg := SessionConfig{Transforms: make(map[string]func(context.Context, string) (string, error))}
			for _, name := range []string{"tone", "safety"} {
				cfg.Transforms[name] = func(_ context.Context, content string) (string, error) {
					longest := func(a, b string) int { return len(a) - len(b) }
					sections <- section{name, slices.MaxFunc(strings.Split(content, "\n"), longest)}
					return content, nil
				}
			}
			plain := m.turn(m.create(m.client, cfg), "say: hi", "hi").requests[0].text("system")
			s := m.create(m.client, SessionConfig{SystemMessage: &SystemMessage{Content: "MORE", Sections: map[string]SystemSection{
				"identity": {Action: "prepend", Content: "BEFORE"},
				"tone":     {Action: "replace", Content: "INSTEAD"},
				"safety":   {Action: "remove"},
			}}})
			got := m.turn(s, "say: hi", "hi").requests[0].text("system")
			m.contains("system prompt", got, "BEFORE", "INSTEAD", "MORE")
			for range cfg.Transforms {
				section := matrixAwait(m, "section", sections)
				m.contains("system prompt before", plain, section.line)
				m.want("system prompt still has "+section.name, strings.Contains(got, section.line), false)
			}
		}},
		{"reasoning effort and model switch", func(m matrix) {
			s := m.create(m.client, SessionConfig{ReasoningEffort: "high"})
			r := m.turn(s, "say: hi", "hi").requests[0]
			m.want("asked", []string{r.Model, r.ReasoningEffort}, []string{"fake-model", "high"})
			sub := s.Subscribe()
			defer sub.Close()
			m.must(s.SetModel(m.ctx, "other-model", &ModelOptions{ReasoningEffort: "low"}))
			change := matrixOne[*SessionModelChange](m, m.until(sub, EventSessionModelChange))
			m.want("change", []string{change.PreviousModel, change.NewModel, change.PreviousReasoningEffort, change.ReasoningEffort}, []string{"fake-model", "other-model", "high", "low"})
			current, err := s.Model(m.ctx)
			m.must(err)
			m.want("current", []string{current.ModelID, current.ReasoningEffort}, []string{"other-model", "low"})
			r = m.turn(s, "say: hi", "hi").requests[0]
			m.want("asked", []string{r.Model, r.ReasoningEffort}, []string{"other-model", "low"})
		}},
		{"streaming on and off", func(m matrix) {
			for streaming, want := range map[bool][]string{true: {"a ", "b ", "c"}, false: nil} {
				turn := m.turn(m.create(m.client, SessionConfig{Streaming: streaming}), "say: a b c", "a b c")
				m.want("asked to stream", turn.requests[0].Stream, streaming)
				var deltas []string
				for _, d := range matrixPayloads[*AssistantMessageDelta](turn.events, true) {
					deltas = append(deltas, d.DeltaContent)
				}
				m.want("deltas", deltas, want)
			}
		}},

		{"plan mode", func(m matrix) {
			asked := make(chan ExitPlanModeRequest, 2)
			s := m.create(m.client, SessionConfig{OnExitPlanMode: func(_ context.Context, r ExitPlanModeRequest) (ExitPlanModeResult, error) {
				asked <- r
				if r.Summary == "too early" {
					return ExitPlanModeResult{Feedback: "think again"}, nil
				}
				return ExitPlanModeResult{Approved: true, SelectedAction: "interactive"}, nil
			}})
			m.must(s.SetMode(m.ctx, AgentModePlan))
			m.must(s.UpdatePlan(m.ctx, "# Plan"))
			for _, round := range []struct {
				summary, told string
				mode          AgentMode
			}{{"too early", "think again", AgentModePlan}, {"do it", "Plan approved", AgentModeInteractive}} {
				// The CLI puts a word of its own before the prompt's first line.
				turn := m.try(s, Message{Prompt: "go\n" + `call: exit_plan_mode {"summary":"` + round.summary + `"}`})
				m.must(turn.err)
				r := matrixAwait(m, "plan", asked)
				m.want("asked", []string{r.Summary, r.PlanContent}, []string{round.summary, "# Plan"})
				m.contains("the tool's result", matrixOne[*ToolExecutionComplete](m, turn.events).Result.Content, round.told)
				m.want("the message's mode", matrixOne[*UserMessage](m, turn.events).AgentMode, AgentModePlan)
				mode, err := s.Mode(m.ctx)
				m.must(err)
				m.want("mode", mode, round.mode)
				m.want("idle", matrixOne[*SessionIdle](m, turn.events).Mode, round.mode)
			}
		}},
		{"autopilot mode", func(m matrix) {
			s := m.create(m.client, SessionConfig{OnPermission: ApproveAll})
			m.must(s.SetMode(m.ctx, AgentModeAutopilot))
			stopped := func(turn matrixTurn) string {
				m.must(turn.err)
				last := len(turn.events) - 1
				m.want("the last event", *turn.events[last].Payload().(*SessionIdle), SessionIdle{Mode: AgentModeAutopilot})
				for _, e := range turn.events {
					if e.Type == EventSessionAutopilotStopped {
						return unquote(member(e.Data, "reason"))
					}
				}
				return ""
			}
			turn := m.try(s, Message{Prompt: `call: task_complete {"summary":"all done"}`})
			m.want("stopped since", stopped(turn), "task_complete")
			m.want("task", matrixOne[*SessionTaskComplete](m, turn.events).Summary, "all done")
			// Who does not say that the task is done is told to go on, some times. That is one turn.
			turn = m.try(s, Message{Prompt: "say: not yet"})
			m.want("stopped since", stopped(turn), "cap_reached")
			told := matrixPayloads[*UserMessage](turn.events, true)[1:]
			for _, u := range told {
				m.want("the CLI's words", u.IsAutopilotContinuation, true)
			}
			m.want("continued", len(told) > 0, true)
			m.want("requests", len(turn.requests), 1+len(told))
		}},
		{"infinite session", func(m matrix) {
			half := 0.5
			s := m.create(m.client, SessionConfig{
				Provider: &ProviderConfig{MaxPromptTokens: 8000}, AvailableTools: []string{}, SystemMessage: &SystemMessage{Mode: "replace", Content: "Be brief."},
				InfiniteSessions: &InfiniteSessions{BackgroundCompactionThreshold: &half},
			})
			sub := s.Subscribe()
			long := strings.Repeat("word ", 4500) + "end"
			m.turn(s, "say: "+long, long)
			m.turn(s, "say: more", "more")
			events := m.until(sub, EventSessionCompactionComplete)
			m.want("begun since", matrixOne[*SessionCompactionStart](m, events).Trigger, "threshold")
			done := matrixOne[*SessionCompactionComplete](m, events)
			m.want("compaction", []any{done.Success, done.Outcome, done.SummaryContent}, []any{true, "applied", "no script"})
			m.want("requests", len(m.requests()), 3) // the turns and the summary, which is the model's own
			for _, r := range m.turn(s, "say: after", "after").requests {
				if last := r.Messages[len(r.Messages)-1].Text; !strings.Contains(last, "say: after") {
					continue // the next compaction, which runs beside the turn
				}
				m.contains("what the model is told", r.text("user"), "no script")
				m.want("what it has said, as far as it is told", r.text("assistant"), "more")
			}
		}},
		{"attachments", func(m matrix) {
			dir := m.TempDir()
			file, other := filepath.Join(dir, "a.txt"), filepath.Join(dir, "b.txt")
			m.must(os.WriteFile(file, []byte("alpha\nbeta\n"), 0o666))
			m.must(os.WriteFile(other, []byte("gamma\nthe words selected\n"), 0o666))
			vision := true
			s := m.create(m.client, SessionConfig{WorkingDirectory: dir, ModelCapabilities: &ModelCapabilities{Supports: &ModelSupports{Vision: &vision}}})
			const image = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
			turn := m.try(s, Message{Prompt: "say: got it", Attachments: []Attachment{
				{Type: AttachmentFile, Path: file},
				{Type: AttachmentDirectory, Path: dir},
				{Type: AttachmentSelection, FilePath: other, Text: "words", Selection: &Selection{Start: Position{1, 4}, End: Position{1, 9}}},
				{Type: AttachmentBlob, Data: image, MIMEType: "image/png"},
			}})
			m.must(turn.err)
			var types []AttachmentType
			for _, a := range matrixOne[*UserMessage](m, turn.events).Attachments {
				types = append(types, a.Type)
			}
			m.want("echoed", types, []AttachmentType{AttachmentFile, AttachmentDirectory, AttachmentSelection, AttachmentBlob})
			m.contains("the model's request", turn.requests[0].text("user"), "* "+file+" (3 lines)", "* "+dir+" (2 items)", "File: b.txt (line 2)\n```\nwords\n```")
			m.contains("the model's request", turn.requests[0].body, `"data:image/png;base64,`+image+`"`)
			// What is stored of them can be read again.
			m.must(s.Disconnect(m.ctx))
			m.resume(m.client, s.ID(), "say: got it")
		}},

		{"resume", func(m matrix) {
			s := m.create(m.client, SessionConfig{})
			m.turn(s, "say: one", "one")
			m.must(s.Disconnect(m.ctx))
			resumed := m.resume(m.client, s.ID(), "say: one")
			m.want("was active", resumed.SessionWasActive, false)
			m.want("model", resumed.SelectedModel, "fake-model")
			_, err := m.client.ResumeSession(m.ctx, "never-created", m.config(SessionConfig{}))
			m.want("ErrSessionNotFound", errors.Is(err, ErrSessionNotFound), true)
		}},
		{"resume after a kill", func(m matrix) {
			home := m.TempDir()
			c := startReal(m.T, Options{BaseDir: home})
			s := m.create(c, SessionConfig{Streaming: true})
			m.turn(s, "say: one", "one")
			turn := async(func() error { _, err := s.SendAndWait(m.ctx, Message{Prompt: "hold: two three"}); return err })
			matrixAwait(m, "the model's first word", m.model.Held)
			stored(m.ctx, m, home, s.ID(), "hold: two three")
			kill(m, c.PID())
			matrixAwait(m, "the client's end", c.Done())
			for what, err := range map[string]error{"turn": matrixAwait(m, "the turn", turn), "client": c.Err(), "session": context.Cause(s.Context())} {
				var exit *ExitError
				m.want("an ExitError ends the "+what, errors.As(err, &exit), true)
			}
			m.resume(startReal(m.T, Options{BaseDir: home}), s.ID(), "say: one | hold: two three")
		}},
		{"two sessions at once", func(m matrix) {
			slow, quick := m.create(m.client, SessionConfig{Streaming: true}), m.create(m.client, SessionConfig{})
			turn := async(func() error { _, err := slow.SendAndWait(m.ctx, Message{Prompt: "hold: one two"}); return err })
			matrixAwait(m, "the model's first word", m.model.Held)
			m.turn(quick, "say: quick", "quick")
			m.turn(quick, "history", "say: quick")
			select {
			case err := <-turn:
				m.Errorf("the other turn has ended: %v", err)
			default:
			}
			m.model.Release()
			m.must(matrixAwait(m, "the slow turn", turn))
			m.turn(slow, "history", "hold: one two")
		}},
		{"20 sessions at once", func(m matrix) {
			ended := make([]<-chan error, 20)
			for i := range ended {
				ended[i] = async(func() error {
					s, err := m.client.CreateSession(m.ctx, m.config(SessionConfig{Streaming: true}))
					if err != nil {
						return err
					}
					want, text, whole := fmt.Sprintf("session %d of 20", i), "", ""
					for e, err := range s.Ask(m.ctx, Message{Prompt: "hold: " + want}) {
						if err != nil {
							return err
						}
						switch p := e.Payload().(type) {
						case *AssistantMessageDelta:
							text += p.DeltaContent
						case *AssistantMessage:
							whole += p.Content
						}
					}
					if text != want || whole != want {
						return fmt.Errorf("got %q and %q, want %q", text, whole, want)
					}
					return s.Disconnect(m.ctx)
				})
			}
			for range ended {
				matrixAwait(m, "an answer that is held", m.model.Held) // all run before the first may end
			}
			for range ended {
				m.model.Release()
			}
			for _, ended := range ended {
				m.must(matrixAwait(m, "turn", ended))
			}
		}},

		{"queued messages", func(m matrix) {
			s := m.create(m.client, SessionConfig{})
			sub := s.Subscribe()
			send := func(msg Message) string {
				id, err := s.Send(m.ctx, msg)
				m.must(err)
				return id
			}
			answer := make(chan string, 1)
			turn := async(func() error {
				a, err := s.SendAndWait(m.ctx, Message{Prompt: "hold: one two"})
				if err == nil {
					answer <- a.Content
				}
				return err
			})
			matrixAwait(m, "the model's first word", m.model.Held)
			b, c := send(Message{Prompt: "say: b"}), send(Message{Prompt: "say: c"})
			a := send(Message{Prompt: "say: a", Prepend: true})
			queue, err := s.Queue(m.ctx)
			m.must(err)
			var queued []string
			for _, item := range queue.Items {
				queued = append(queued, item.MessageID)
			}
			m.want("queue", queued, []string{a, b, c})
			m.model.Release()
			events := m.until(sub, EventSessionIdle) // the only one
			var order, texts []string
			for _, u := range matrixPayloads[*UserMessage](events, true)[1:] {
				m.want("delivery", u.Delivery, "queued")
				order = append(order, u.MessageID)
			}
			for _, a := range matrixPayloads[*AssistantMessage](events, true) {
				texts = append(texts, a.Content)
			}
			m.want("order", order, []string{a, b, c})
			m.want("answers", texts, []string{"one two", "a", "b", "c"})
			m.must(matrixAwait(m, "the first turn", turn))
			m.want("the first one's answer", matrixAwait(m, "answer", answer), "one two")
		}},
		{"steering message", func(m matrix) {
			begun, goOn := make(chan struct{}), make(chan struct{})
			s := m.create(m.client, SessionConfig{Tools: []Tool{{Name: "slow", SkipPermission: true, Handler: func(ctx context.Context, _ ToolCall) (ToolResult, error) {
				close(begun)
				select {
				case <-goOn:
				case <-ctx.Done():
				}
				return ToolResult{Text: "done"}, nil
			}}}})

			sub := s.Subscribe()
			_, err := s.Send(m.ctx, Message{Prompt: "call: slow {}"})
			m.must(err)
			matrixAwait(m, "the tool", begun)
			id, err := s.Send(m.ctx, Message{Prompt: "say: steered", Mode: Immediate})
			m.must(err)
			queue, err := s.Queue(m.ctx)
			m.must(err)
			m.want("queue", []int{len(queue.Items), len(queue.SteeringMessages)}, []int{0, 1})
			close(goOn)
			events := m.until(sub, EventSessionIdle)
			said := matrixPayloads[*UserMessage](events, true)
			m.want("the second message", []string{said[1].MessageID, said[1].Delivery, said[1].InteractionID}, []string{id, "steering", said[0].InteractionID})
			answers := matrixPayloads[*AssistantMessage](events, true)
			m.want("the answer", answers[len(answers)-1].Content, "steered")
			last := m.requests()[1]
			m.want("the model has the result too", strings.TrimSpace(last.text("tool")), "done")
		}},
		{"hooks in order", func(m matrix) {
			hooks := make(chan HookCall, 32)
			s := m.create(m.client, SessionConfig{
				OnPermission: ApproveAll,
				Tools:        []Tool{{Name: "broken", SkipPermission: true, Handler: func(context.Context, ToolCall) (ToolResult, error) { return ToolResult{}, errors.New("broken") }}},
				OnHook:       func(_ context.Context, h HookCall) (any, error) { hooks <- h; return nil, nil },
			})
			m.turn(s, `call: glob {"pattern":"*"}`, "tool said: No files matched the pattern.")
			m.turn(s, `call: broken {}`, "tool said: broken")
			m.want("refused", m.try(s, Message{Prompt: "status: 400"}).err != nil, true)
			m.must(s.Disconnect(m.ctx))
			var order []string
			for range len(hooks) {
				h := <-hooks
				m.want("session", h.SessionID, s.ID())
				if h.Type != "sessionStart" { // no other waits for it
					order = append(order, h.Type)
				}
			}
			m.want("hooks", order, []string{
				"userPromptSubmitted", "userPromptTransformed", "preToolUse", "postToolUse", "agentStop",
				"userPromptSubmitted", "userPromptTransformed", "preToolUse", "postToolUseFailure", "agentStop",
				"userPromptSubmitted", "userPromptTransformed", "errorOccurred",
				"sessionEnd",
			})
		}},
	}
	// The rows run beside each other; when this Run returns, they have ended.
	t.Run("rows", func(t *testing.T) {
		for _, row := range rows {
			t.Run(row.name, func(t *testing.T) {
				t.Parallel()
				row.run(matrix{t, hdlContext(t), client, newModelServer(t)})
			})
		}
	})
}

// TestAnswersOfOthers has messages of others beside the one that is waited for.
func TestAnswersOfOthers(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	for _, tt := range []struct {
		name   string
		events [][3]string // "user", id, delivery or "assistant", text, whose message it answers; m is the one that is waited for
		want   string
	}{
		{"queued behind", [][3]string{{"user", "m", "idle"}, {"assistant", "mine", "m"}, {"user", "b", "queued"}, {"assistant", "", ""}, {"assistant", "not mine", "b"}}, "mine"},
		{"two queued behind", [][3]string{{"user", "m", "idle"}, {"assistant", "mine", "m"}, {"user", "b", "queued"}, {"assistant", "not mine", "b"}, {"user", "c", "queued"}, {"assistant", "nor that", "c"}}, "mine"},
		{"steers", [][3]string{{"user", "m", "idle"}, {"assistant", "first", "m"}, {"user", "b", "steering"}, {"assistant", "steered", "m"}}, "steered"},
		{"steered by it", [][3]string{{"user", "a", "idle"}, {"assistant", "first", "a"}, {"user", "m", "steering"}, {"assistant", "steered", "a"}}, "steered"},
		{"told to go on", [][3]string{{"user", "m", "idle"}, {"assistant", "first", "m"}, {"user", "auto", "idle"}, {"assistant", "done", "m"}}, "done"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := createSession(t, c, nil)
			p.handle("session.send", func(*peer, peerMessage) any { return map[string]any{"messageId": "m"} })
			sent := len(p.calls("session.send"))
			var got *AssistantMessage
			turn := async(func() (err error) {
				got, err = s.SendAndWait(testContext(t), Message{Prompt: "x"})
				return err
			})
			p.wait("session.send", sent+1)
			p.sync() // the answer has been read
			for _, e := range tt.events {
				switch e[0] {
				case "user":
					p.emit(s.ID(), "user.message", map[string]any{"content": "x", "messageId": e[1], "delivery": e[2]})
				default:
					p.emit(s.ID(), "assistant.message", map[string]any{"content": e[1], "originatingMessageId": e[2]})
				}
			}
			p.emit(s.ID(), "session.idle", map[string]any{})
			if err := await(t, "turn", turn); err != nil {
				t.Fatal(err)
			}
			if got == nil || got.Content != tt.want {
				t.Errorf("got %+v, want %q", got, tt.want)
			}
		})
	}
}

// matrixMCP is an MCP server over stdio with the tools echo, which also tells a variable of its environment, fail, and ask, which asks the
// user.
func matrixMCP() int {
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	type object = map[string]any
	send := func(m object) {
		m["jsonrpc"] = "2.0"
		_ = out.Encode(m)
	}
	result := func(id json.RawMessage, text string, failed bool) {
		send(object{"id": id, "result": object{"content": []object{{"type": "text", "text": text}}, "isError": failed}})
	}
	var asking json.RawMessage // the call that waits for the user
	for {
		var m struct {
			ID     json.RawMessage
			Method string
			Params struct {
				ProtocolVersion, Name string
				Arguments             struct{ Text string }
			}
			Result struct { // the user's answer
				Action  string
				Content struct{ Colour string }
			}
		}
		if in.Decode(&m) != nil {
			return 0
		}
		switch m.Method + " " + m.Params.Name {
		case "initialize ":
			send(object{"id": m.ID, "result": object{"protocolVersion": m.Params.ProtocolVersion, "capabilities": object{"tools": object{}},
				"serverInfo": object{"name": "tiny", "version": "1"}}})
		case "tools/list ":
			var tools []object
			for _, name := range []string{"ask", "echo", "fail"} {
				tools = append(tools, object{"name": name, "description": name, "inputSchema": object{"type": "object"}})
			}
			send(object{"id": m.ID, "result": object{"tools": tools}})
		case "tools/call echo":
			result(m.ID, m.Params.Arguments.Text+", "+os.Getenv("TINY"), false)
		case "tools/call fail":
			result(m.ID, "no luck", true)
		case "tools/call ask":
			asking = m.ID
			send(object{"id": "question", "method": "elicitation/create", "params": object{"message": "Which colour?",
				"requestedSchema": object{"type": "object", "properties": object{"colour": object{"type": "string"}}}}})
		case " ":
			result(asking, m.Result.Action+" "+m.Result.Content.Colour, false)
		default:
			if m.ID != nil {
				send(object{"id": m.ID, "result": object{}})
			}
		}
	}
}

// soakHeap returns what is on the heap for good.
func soakHeap() int64 {
	runtime.GC()
	runtime.GC() // pools are empty after the second
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// soakFlat runs cycle n times and fails when something is left of each.
func soakFlat(t *testing.T, n int, cycle func()) {
	t.Helper()
	for range 1 + n/10 { // caches fill
		cycle()
	}
	before := soakHeap()
	for range n {
		cycle()
	}
	soakGrown(t, before, n)
}

// soakGrown fails when more than fifty bytes are left of each of n, besides what a heap gains and loses by itself.
func soakGrown(t *testing.T, before int64, n int) {
	t.Helper()
	grown := soakHeap() - before
	t.Logf("%d bytes are left of %d", grown, n)
	if grown > int64(50*n+64<<10) {
		t.Error("too much")
	}
}

// TestSoak is much of everything, at a fortieth of its size unless COPILOT_TEST_ROUNDS asks for all: nothing is lost, and nothing is left.
func TestSoak(t *testing.T) {
	create := func(c *Client, cfg *SessionConfig) *Session { // with nothing for the test to keep
		s, err := c.CreateSession(context.Background(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	t.Run("sessions", func(t *testing.T) {
		leakCheck(t)
		c, n := benchClient(t, "pipe"), spineRounds(10_000)
		emit := func() { // one event to each session
			if err := c.Call(context.Background(), "bench.emit", benchWork{Kind: "delta", Size: 400, Sessions: n}.params(n), nil); err != nil {
				t.Fatal(err)
			}
		}
		emit() // of which the server keeps the frames
		before, goroutines := int64(0), runtime.NumGoroutine()
		for round := range 2 {
			if round == 1 { // a map keeps the room that the first round made; what leaks, leaks again
				before = soakHeap()
			}
			sessions, subs := make([]*Session, n), make([]*Subscription[Event], n)
			for i := range sessions {
				sessions[i] = create(c, &SessionConfig{SessionID: fmt.Sprint("s", i)})
				subs[i] = sessions[i].Subscribe()
			}
			if g := runtime.NumGoroutine(); g > goroutines {
				t.Errorf("%d goroutines were %d", g, goroutines)
			}
			for range 3 {
				emit()
			}
			for i, s := range sessions {
				if err := s.Disconnect(context.Background()); err != nil {
					t.Fatal(err)
				}
				if events, skipped := soakDrain(t, subs[i]); events != 3 || skipped != 0 {
					t.Fatalf("session %d: %d events, %d skipped", i, events, skipped)
				}
			}
			clear(sessions)
			clear(subs)
		}
		soakGrown(t, before, n)
	})
	t.Run("events", func(t *testing.T) {
		leakCheck(t)
		const many = 256
		c := benchClient(t, "pipe")
		soakEvents(t, c, many, many*20) // the server keeps its frames, the runtime what goroutines need
		before := soakHeap()
		soakEvents(t, c, many, spineRounds(1_000_000)/many*many)
		soakGrown(t, before, many)
	})
	t.Run("cycles", func(t *testing.T) {
		leakCheck(t)
		c := benchClient(t, "pipe")
		soakFlat(t, spineRounds(10_000), func() {
			s := create(c, nil)
			s.Subscribe()
			if err := s.Disconnect(context.Background()); err != nil {
				t.Fatal(err)
			}
		})
	})
	t.Run("clients", func(t *testing.T) {
		spineFlat(t)
		o := spineOptions(t, spineScript{})
		soakFlat(t, spineRounds(1_000), func() {
			c, err := Start(context.Background(), o)
			if err != nil {
				t.Fatal(err)
			}
			if _, err = c.CreateSession(context.Background(), nil); err != nil {
				t.Error(err)
			}
			if err := c.Stop(context.Background()); err != nil {
				t.Fatal(err)
			}
		})
	})
}

// soakEvents publishes n events to many sessions in turn, each with readers of every kind, and checks what each of these gets.
func soakEvents(t *testing.T, c *Client, many, n int) {
	work := benchWork{Kind: "delta", Size: 400, Sessions: many}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	turn := make(chan struct{}) // one for each slow reader after each batch
	var slow int
	var readers sync.WaitGroup
	var sessions []*Session
	for i := range many {
		s, err := c.CreateSession(context.Background(), &SessionConfig{SessionID: fmt.Sprint("s", i), EventBuffer: 16}) // with nothing for the test to keep
		if err != nil {
			t.Fatal(err)
		}
		sessions = append(sessions, s)
		s.Events(ctx) // nobody ranges it
		fast := s.Subscribe()
		readers.Add(1)
		go func() { // ends with the session; awaited below
			defer readers.Done()
			soakCount(t, fast, n/many, nil)
		}()
		if i%4 == 0 {
			sub := s.Subscribe()
			slow++
			readers.Add(1)
			go func() { // as above
				defer readers.Done()
				soakCount(t, sub, n/many, turn)
			}()
		}
		if i%4 == 1 { // comes and goes
			readers.Add(1)
			go func() { // as above
				defer readers.Done()
				for s.failure() == nil {
					sub := s.Subscribe()
					for range 5 {
						if _, err := sub.Next(context.Background()); err != nil {
							break
						}
					}
					sub.Close()
				}
			}()
		}
	}
	for sent := 0; sent < n; {
		batch := min(many*20, n-sent)
		var leaving []*Subscription[Event]
		for i := 2; i < many; i += 4 {
			leaving = append(leaving, sessions[i].Subscribe())
		}
		if err := c.Call(context.Background(), "bench.emit", work.params(batch), nil); err != nil {
			t.Fatal(err)
		}
		sent += batch
		for _, sub := range leaving { // what came before the answer can be read, and is all there was
			soakLeave(t, sub, batch/many)
		}
		for range slow {
			turn <- struct{}{}
		}
	}
	close(turn)
	for _, s := range sessions {
		if err := s.Disconnect(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	readers.Wait()
}

// soakDrain reads to the end.
func soakDrain(t *testing.T, sub *Subscription[Event]) (events int, skipped uint64) {
	for _, err := range sub.All(context.Background()) {
		var lag *LagError
		switch {
		case err == nil:
			events++
		case errors.As(err, &lag):
			skipped += lag.Skipped
		default:
			t.Error(err)
		}
	}
	return events, skipped
}

// soakLeave reads what is there, checks that nothing is missing, and leaves.
func soakLeave(t *testing.T, sub *Subscription[Event], published int) {
	t.Helper()
	events, skipped := 0, uint64(0)
	for {
		_, ready, err := sub.poll()
		var lag *LagError
		switch {
		case errors.As(err, &lag):
			skipped += lag.Skipped
			continue
		case err != nil:
			t.Error(err)
		case ready:
			events++
			continue
		}
		break
	}
	if sub.Close(); uint64(events)+skipped != uint64(published) {
		t.Errorf("one that leaves: %d events and %d skipped, of %d", events, skipped, published)
	}
}

// soakCount reads to the end and checks that nothing is missing. With turns, it reads three events in each as long as there are some, and breaks
// its loop after each.
func soakCount(t *testing.T, sub *Subscription[Event], published int, turns <-chan struct{}) {
	events, skipped := 0, uint64(0)
	if turns != nil {
		for range turns {
			n := 0
			for _, err := range sub.All(context.Background()) {
				var lag *LagError
				if errors.As(err, &lag) {
					skipped += lag.Skipped
				} else {
					events++
				}
				if n++; n == 3 {
					break
				}
			}
		}
	}
	e, s := soakDrain(t, sub)
	if events, skipped = events+e, skipped+s; uint64(events)+skipped != uint64(published) {
		t.Errorf("%d events and %d skipped, of %d", events, skipped, published)
	}
	if turns != nil && published > 200 && skipped == 0 {
		t.Error("a slow reader missed nothing: the test does not test what it says")
	}
}

// TestRouterAgainstModel starts, watches, ends and follows sessions of three ids in random order, and compares what subscribers get with a
// reference that keeps everything.
func TestRouterAgainstModel(t *testing.T) {
	leakCheck(t)
	for seed := range int64(max(3, spineRounds(400))) {
		routerAgainstModel(t, seed)
	}
}

func routerAgainstModel(t *testing.T, seed int64) {
	const size = 8
	ids := []string{"a", "b", "c"}
	random := rand.New(rand.NewSource(seed))
	near, far := net.Pipe()
	defer near.Close()
	p := startPeer(t, far)
	c, err := NewClient(testContext(t), near, nil)
	if err != nil {
		t.Fatal(err)
	}
	type life struct { // of one session or watch, from being prepared to its end
		id       string
		prepared *PreparedSession
		session  *Session            // nil when it was not started
		watch    *SharedSessionWatch // or a watch in its place
		want     *spineRing
	}
	type reader struct {
		life *life
		sub  *Subscription[Event]
		cur  *spineCursor
	}
	open := make(map[string]*life)
	var readers []*reader
	var lives []*life
	seq := 0
	fail := func(format string, args ...any) {
		t.Helper()
		t.Fatalf("seed %d: %s", seed, fmt.Sprintf(format, args...))
	}
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	// take reads in one of the ways there are. Those that wait are for what should be ready.
	take := func(sub *Subscription[Event], ready bool) (v Event, _ bool, err error) {
		switch way := random.Intn(3); {
		case way == 0 && ready:
			v, err = sub.Next(testContext(t))
			return v, true, err
		case way == 1 && ready:
			for v, err := range sub.All(testContext(t)) {
				return v, true, err // and goes on with the next range
			}
			return v, true, io.EOF
		}
		return sub.poll()
	}
	read := func(r *reader, most int) {
		t.Helper()
		for range most {
			last := r.life.want.ended && r.cur.pos == len(r.life.want.all)
			wantV, wantReady, wantErr := r.life.want.poll(r.cur)
			if last && wantErr == nil {
				wantErr = io.EOF
			}
			v, ready, err := take(r.sub, wantReady)
			var lag, wantLag *LagError
			same := ready == wantReady && errors.As(err, &lag) == errors.As(wantErr, &wantLag)
			switch {
			case !same:
			case lag != nil:
				same = *lag == *wantLag
			case wantErr != nil:
				same = errors.Is(err, wantErr)
			case ready:
				same = err == nil && string(v.Data) == strconv.Itoa(wantV)
			}
			if !same {
				fail("session %s: got %s, %v, %v, want %d, %v, %v", r.life.id, v.Data, ready, err, wantV, wantReady, wantErr)
			}
			if !ready || err != nil && lag == nil {
				return
			}
		}
	}
	subscribe := func(l *life) {
		r := &reader{life: l, cur: &spineCursor{pos: len(l.want.all)}}
		switch {
		case l.watch != nil:
			r.sub = l.watch.ring.subscribe()
		case l.session != nil:
			r.sub = l.session.Subscribe()
		default:
			r.sub = l.prepared.Subscribe()
		}
		readers = append(readers, r)
	}
	end := func(l *life, err error) {
		l.want.ended, l.want.err = true, err
		if open[l.id] == l {
			delete(open, l.id)
		}
	}
	prepare := func(id string) *life {
		prepared, err := c.PrepareSession(&SessionConfig{SessionID: id, EventBuffer: size})
		if err != nil {
			fail("%v", err)
		}
		l := &life{id: id, prepared: prepared, want: &spineRing{max: size}}
		subscribe(l)
		return l
	}
	for range 150 {
		id := ids[random.Intn(len(ids))]
		l := open[id]
		switch k := random.Intn(100); {
		case k < 40: // an event, for whomever has the id
			p.send(notification("session.event", map[string]any{"sessionId": id, "event": map[string]any{"type": "x", "data": seq}}))
			p.sync()
			if l != nil {
				l.want.all = append(l.want.all, seq)
			}
			seq++
		case k < 50:
			next := prepare(id)
			session, err := next.prepared.Start(testContext(t))
			switch {
			case l != nil && !errors.Is(err, ErrSessionOpen):
				fail("an open id was started again: %v", err)
			case l != nil:
				end(next, ErrSessionOpen)
			case err != nil:
				fail("%v", err)
			default:
				next.session, open[id] = session, next
				lives = append(lives, next)
			}
		case k < 53: // what is not started gets nothing
			next := prepare(id)
			if err := next.prepared.Close(); err != nil {
				fail("%v", err)
			}
			end(next, nil)
		case k < 58:
			serveWatch(p, id, nil)
			w, err := c.WatchSharedSession(testContext(t), id, &WatchOptions{EventBuffer: size})
			switch {
			case l != nil && !errors.Is(err, ErrSessionOpen):
				fail("an open id was watched: %v", err)
			case l == nil && err != nil:
				fail("%v", err)
			case l == nil:
				next := &life{id: id, watch: w, want: &spineRing{max: size}}
				readers = append(readers, &reader{next, w.sub, &spineCursor{}})
				open[id] = next
			}
		case k < 62 && l != nil:
			subscribe(l)
		case k < 67 && l != nil:
			var err error
			if l.watch != nil {
				err = l.watch.Close(testContext(t))
			} else {
				err = l.session.Disconnect(testContext(t))
			}
			if err != nil {
				fail("%v", err)
			}
			end(l, nil)
		case k < 71: // each notice ends what it is meant for, and nothing else
			p.send(notification("session.lifecycle", map[string]any{"type": "session.deleted", "sessionId": id}))
			if random.Intn(2) == 0 {
				p.send(disconnected(id))
				if l != nil && l.watch != nil {
					end(l, ErrDisconnected)
				}
			}
			if p.sync(); l != nil && l.session != nil {
				end(l, ErrSessionNotFound)
			}
		case len(readers) == 0:
		case k < 75:
			r := readers[random.Intn(len(readers))]
			r.sub.Close()
			r.cur.closed = true
		case k < 80: // takes nothing away
			r := readers[random.Intn(len(readers))]
			if _, err := r.sub.Next(gone); !errors.Is(err, context.Canceled) {
				fail("with a ctx that is done: %v", err)
			}
		default:
			read(readers[random.Intn(len(readers))], 1+random.Intn(2*size))
		}
	}
	var cause error
	if random.Intn(2) == 0 {
		far.Close()
		await(t, "client's end", c.Done())
		cause = io.ErrUnexpectedEOF
	} else if err := c.Stop(testContext(t)); err != nil {
		fail("%v", err)
	}
	for _, l := range open {
		end(l, cause)
	}
	for _, r := range readers {
		read(r, 1+size+1)
	}
	for _, l := range lives {
		if l.session.failure() == nil {
			fail("session %s has no end", l.id)
		}
	}
	if n := len(c.routes); n > 0 {
		fail("%d routes are left", n)
	}
}

// TestRouterConcurrently lets sessions and watches of the same ids come and go while their events pass: whoever sees some, sees all of a stretch,
// in order; and who stays sees everything.
func TestRouterConcurrently(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	events := spineRounds(80_000)
	serveWatch(p, "w", nil)
	ids := []string{"a", "b", "w", "stays"}
	stay := createSession(t, c, &SessionConfig{SessionID: "stays", EventBuffer: 16})
	var stayed []<-chan error
	for range 2 {
		sub := stay.Subscribe()
		stayed = append(stayed, async(func() error {
			n, err := routerStretch(context.Background(), sub)
			if err == nil && n != events {
				err = fmt.Errorf("%d events and skipped ones, of %d", n, events)
			}
			return err
		}))
	}
	// begin returns a subscription from before the first event, and what ends its session or watch.
	begin := func(id string, size int) (*Subscription[Event], func(context.Context) error, error) {
		if id == "w" {
			w, err := c.WatchSharedSession(testContext(t), id, &WatchOptions{EventBuffer: size})
			if err != nil {
				return nil, nil, err
			}
			return w.sub, w.Close, nil
		}
		prepared, err := c.PrepareSession(&SessionConfig{SessionID: id, EventBuffer: size})
		if err != nil {
			return nil, nil, err
		}
		sub := prepared.Subscribe()
		s, err := prepared.Start(testContext(t))
		if err != nil {
			return nil, nil, err
		}
		return sub, s.Disconnect, nil
	}
	stop := make(chan struct{})
	var all sync.WaitGroup
	for _, id := range ids[:3] {
		for range 2 { // two that want the same id
			all.Add(1)
			go func() { // ends with stop; awaited below
				defer all.Done()
				for i := 0; !isClosed(stop); i++ {
					sub, end, err := begin(id, 4+i%5)
					if errors.Is(err, ErrSessionOpen) {
						runtime.Gosched()
						continue
					}
					if err != nil {
						t.Error(err)
						return
					}
					ctx, cancel := context.WithTimeout(context.Background(), patience)
					done := async(func() error { _, err := routerStretch(ctx, sub); return err })
					runtime.Gosched()
					err = errors.Join(end(ctx), <-done)
					if cancel(); err != nil {
						t.Error(err)
						return
					}
				}
			}()
		}
	}
	for n := range events {
		var frames []any
		for _, id := range ids {
			frames = append(frames, notification("session.event", map[string]any{"sessionId": id, "event": map[string]any{"type": "x", "data": n}}))
		}
		p.send(frames...)
	}
	close(stop)
	all.Wait()
	if err := stay.Disconnect(testContext(t)); err != nil {
		t.Error(err)
	}
	for _, r := range stayed {
		if err := await(t, "one that stays", r); err != nil {
			t.Error(err)
		}
	}
}

// routerStretch reads to the end, returns how many events there were, skipped ones included, and fails where they do not follow each other.
func routerStretch(ctx context.Context, sub *Subscription[Event]) (n int, err error) {
	last := -1
	gap := 0 // skipped since the last one
	for e, err := range sub.All(ctx) {
		var lag *LagError
		if errors.As(err, &lag) {
			gap += int(lag.Skipped)
			n += int(lag.Skipped)
			continue
		}
		if err != nil {
			return n, err
		}
		at, err := strconv.Atoi(string(e.Data))
		if err != nil {
			return n, err
		}
		if last >= 0 && at != last+1+gap {
			return n, fmt.Errorf("event %d after %d and %d skipped ones", at, last, gap)
		}
		last, gap = at, 0
		n++
	}
	return n, nil
}

// FuzzAddr compares addresses with what package netip says of them.
func FuzzAddr(f *testing.F) {
	for _, s := range []string{"", "0", "h:0", "1", "65535", "65536", "localhost:80", "http://localhost:80/", "https://[::1]:443", "127.0.0.1:1", "[fe80::1%25lo]:9", "[::1%]x]:9", ":1", "a:b:c", "http://u@h:1", "h:0x1", "h:+1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := parseAddr(s)
		if want, bad := netip.ParseAddrPort(s); bad == nil && want.Port() != 0 && want.Addr().Zone() == "" {
			if same, bad := netip.ParseAddrPort(got); err != nil || bad != nil || same != want {
				t.Fatalf("%q: got %q, %v", s, got, err)
			}
		}
		if err != nil {
			if !errors.Is(err, ErrInvalidConfig) || len(err.Error()) > 8*maxQuote {
				t.Fatalf("%q: %v", s, err)
			}
			return
		}
		host, port, err := net.SplitHostPort(got)
		n, bad := strconv.ParseUint(port, 10, 16)
		if again, err2 := parseAddr(got); err != nil || bad != nil || n == 0 || host == "" || again != got || err2 != nil {
			t.Fatalf("%q: got %q, which is read as %q, %v", s, got, again, err2)
		}
	})
}

// FuzzPortLine feeds stdout in pieces, and compares with the lines taken one by one.
func FuzzPortLine(f *testing.F) {
	for _, s := range []string{"", "listening on port 1\n", "log\nCLI server listening on port 49152\nmore", "x\nlistening on port 5\n", "listening on port 0\n", "listening on port 70000.\n", "LISTENING ON PORT 8080;", "listening on port"} {
		f.Add([]byte(s), uint8(3))
	}
	f.Fuzz(func(t *testing.T, out []byte, piece uint8) {
		want := 0
		for _, line := range strings.Split(string(out), "\n") {
			if m := portLine.FindStringSubmatch(line[:min(len(line), 4*maxQuote)]); m != nil {
				n, err := strconv.ParseUint(strings.TrimRight(m[1], ".,;"), 10, 16)
				if err == nil {
					want = int(n)
				}
				break
			}
		}
		var s portScanner
		port, over := 0, false
		for rest := out; !over; {
			n := min(len(rest), int(piece)+1)
			port, over = s.write(rest[:n], n == len(rest))
			rest = rest[n:]
		}
		if port != want {
			t.Fatalf("%q in pieces of %d: port %d, want %d", out, piece, port, want)
		}
		if text := s.error().Output; len(text) > maxQuote || !json.Valid([]byte(strconv.QuoteToASCII(text))) && text == "" {
			t.Fatalf("quotes %d bytes", len(text))
		}
	})
}
