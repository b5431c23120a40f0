// Chat holds a conversation with Copilot in the terminal:
//
//	chat [flags] [prompt ...]
//
// Every argument is a prompt; without arguments, every line of standard input is. Answers go to standard output, all else to standard
// error. Ctrl-C aborts the running turn; a second one, or one at the prompt, leaves.
//
// It runs the Copilot CLI that it finds, with that CLI's login or with a model endpoint of your own: see the flags, which default to the
// CLI's own variables; the endpoint's key is read from COPILOT_PROVIDER_API_KEY. Without a CLI, or with -demo, a scripted server
// at the end of this file answers.
package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/textproto"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"copilot"
)

type chat struct {
	terminal bool                            // somebody may be there to be asked
	stdin    chan string                     // lines
	asking   sync.Mutex                      // one question at a time,
	shown    chan struct{}                   // and after what led to it
	running  atomic.Pointer[copilot.Session] // whose turn Ctrl-C aborts
}

func main() {
	config := &copilot.SessionConfig{Streaming: true, Tools: []copilot.Tool{dice()}}
	provider := &copilot.ProviderConfig{APIKey: os.Getenv("COPILOT_PROVIDER_API_KEY")}
	demo := flag.Bool("demo", false, "talk to a scripted server instead of a Copilot CLI")
	yes := flag.Bool("yes", false, "permit whatever the agent asks for")
	flag.StringVar(&config.Model, "model", os.Getenv("COPILOT_MODEL"), "`name` of the model")
	flag.StringVar(&provider.BaseURL, "base-url", os.Getenv("COPILOT_PROVIDER_BASE_URL"), "`URL` of a model endpoint of your own")
	flag.StringVar(&provider.Type, "provider", os.Getenv("COPILOT_PROVIDER_TYPE"), "`type` of that endpoint: openai, azure or anthropic")
	flag.Parse()

	stdin, err := os.Stdin.Stat()
	terminal := err == nil && stdin.Mode()&os.ModeCharDevice != 0
	c := &chat{terminal: terminal, stdin: make(chan string), shown: make(chan struct{}, 1)}
	if terminal || flag.NArg() == 0 { // otherwise it belongs to somebody else
		go c.read() // ends with standard input or the program
	}
	if config.OnPermission = c.permission; *yes {
		config.OnPermission = copilot.ApproveAll
	}
	if provider.BaseURL != "" {
		config.Provider = provider
	}
	ctx, leave := context.WithCancel(context.Background())
	go c.interrupts(ctx, leave) // ends with the program

	client, err := connect(ctx, *demo)
	if err == nil {
		err = c.talk(ctx, client, config, flag.Args())
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second) // the conversation's may have ended
		err = errors.Join(err, client.Stop(ctx))
		cancel()
	}
	if err != nil {
		note("chat: %v", err)
	}
	switch {
	case ctx.Err() != nil || errors.Is(err, copilot.ErrAborted):
		os.Exit(130) // as shells count an interrupt
	case err != nil:
		os.Exit(1)
	}
}

// connect starts the CLI or, where there is none, the demo.
func connect(ctx context.Context, demo bool) (*copilot.Client, error) {
	if !demo {
		client, err := copilot.Start(ctx, nil)
		if !errors.Is(err, copilot.ErrCLINotFound) {
			return client, err
		}
		note("%v: copilot should be on PATH, or its path in COPILOT_CLI_PATH\nThis is the demo.", copilot.ErrCLINotFound)
	}
	near, far := net.Pipe()
	go play(far) // ends when the client closes its end
	return copilot.NewClient(ctx, near, nil)
}

// talk opens a session and takes one prompt after the other: args or, without any, lines of standard input.
func (c *chat) talk(ctx context.Context, client *copilot.Client, config *copilot.SessionConfig, args []string) error {
	if config.Provider == nil {
		if status, err := client.AuthStatus(ctx); err == nil && !status.IsAuthenticated {
			return errors.New("not logged in: run \"copilot login\", or give -base-url and -model, or try -demo")
		}
	}
	session, err := client.CreateSession(ctx, config)
	if err != nil {
		return err
	}
	for _, prompt := range args {
		if err := c.turn(ctx, session, prompt); err != nil {
			return err
		}
	}
	for len(args) == 0 {
		prompt, ok := c.line(ctx, "> ")
		if !ok {
			break
		}
		if err := c.turn(ctx, session, prompt); err != nil {
			if !c.terminal || session.Context().Err() != nil {
				return err
			}
			note("%v", err) // the next prompt may do better
		}
	}
	return nil
}

// turn sends a prompt and shows what comes of it.
func (c *chat) turn(ctx context.Context, session *copilot.Session, prompt string) error {
	if prompt == "" {
		return nil
	}
	c.running.Store(session)
	defer c.running.Store(nil)
	streamed := "" // id of the message that stands on the last line
	for event, err := range session.Ask(ctx, copilot.Message{Prompt: prompt}) {
		if event.AgentID != "" { // what sub-agents do is the agent's business
			continue
		}
		payload := event.Payload()
		delta, more := payload.(*copilot.AssistantMessageDelta)
		if streamed != "" && (err != nil || more && delta.MessageID != streamed) { // it broke; the model may begin again
			fmt.Println()
			streamed = ""
		}
		if lag := new(copilot.LagError); errors.As(err, &lag) {
			note("%v", err) // the terminal was too slow; the turn goes on
		} else if err != nil {
			return err
		}
		switch p := payload.(type) {
		case *copilot.AssistantMessageDelta:
			fmt.Print(p.DeltaContent)
			streamed = p.MessageID
		case *copilot.AssistantMessage:
			if streamed == "" { // not every endpoint streams
				fmt.Print(p.Content)
			}
			if streamed = ""; p.Content != "" {
				fmt.Println()
			}
		case *copilot.ToolExecutionStart:
			note("-> %s %.200s", p.ToolName, p.Arguments)
		case *copilot.ToolExecutionComplete:
			if p.Result != nil {
				note("<- %.200q", p.Result.Content)
			} else if p.Error != nil {
				note("<- failed: %.200q", p.Error.Message)
			}
		case *copilot.PermissionRequested:
			select {
			case c.shown <- struct{}{}:
			default:
			}
		}
	}
	return nil
}

// dice is a tool of ours, which the model may use without asking: it harms nobody.
func dice() copilot.Tool {
	type roll struct {
		Sides int `json:"sides" description:"how many sides the die has"`
	}
	tool := copilot.NewTool("roll_dice", "Rolls a die.", func(_ context.Context, r roll) (int, error) {
		return 1 + rand.IntN(max(r.Sides, 1)), nil
	})
	tool.SkipPermission = true
	return tool
}

// permission asks whoever is there. Refusals come with words: the model sees them and goes on, where a bare one ends the run.
func (c *chat) permission(ctx context.Context, r copilot.PermissionRequest) (copilot.PermissionDecision, error) {
	c.asking.Lock()
	defer c.asking.Unlock()
	select {
	case <-c.shown:
	case <-time.After(time.Second): // it will not be, or was long ago
	}
	what := fmt.Sprintf("%s %q", r.Kind, cmp.Or(r.FullCommandText, r.FileName, r.Path, r.URL, r.ToolName, string(r.Raw)))
	answer, there := "", false
	if c.terminal {
		answer, there = c.line(ctx, "permit "+what+"? [y/N] ")
	}
	switch {
	case ctx.Err() != nil: // nobody waits for it any more
		return copilot.PermissionDecision{}, ctx.Err()
	case answer == "y":
		return copilot.ApproveOnce(), nil
	case there:
		return copilot.Reject("the user said no"), nil
	}
	note("refused: %s (-yes permits everything)", what)
	return copilot.Reject("nobody is there to permit it"), nil
}

// interrupts makes a Ctrl-C abort the running turn, once, or else leave.
func (c *chat) interrupts(ctx context.Context, leave context.CancelFunc) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	for s := range signals {
		if session := c.running.Swap(nil); session != nil && s == os.Interrupt {
			go session.Abort(ctx) // ends with ctx at the latest; the turn tells how it went
		} else {
			leave()
		}
	}
}

// line returns the next line, false at the end of the input or of ctx.
func (c *chat) line(ctx context.Context, sign string) (string, bool) {
	if c.terminal {
		fmt.Fprint(os.Stderr, sign)
	}
	select {
	case line, ok := <-c.stdin:
		return line, ok
	case <-ctx.Done():
		if c.terminal {
			note("")
		}
		return "", false
	}
}

func (c *chat) read() {
	in := bufio.NewScanner(os.Stdin)
	for in.Buffer(nil, 1<<20); in.Scan(); {
		c.stdin <- strings.TrimSpace(in.Text())
	}
	if in.Err() != nil {
		note("chat: standard input: %v", in.Err())
	}
	close(c.stdin)
}

func note(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

// What follows is the other end of the protocol: a server that plays the same short scene for every prompt.

type demo struct {
	conn    net.Conn
	in      *bufio.Reader
	session string
	count   int // of what it has sent
}

type object map[string]any

type request struct {
	ID     json.RawMessage
	Method string
	Params struct {
		SessionID, Prompt string
		Result            any
	}
}

func play(conn net.Conn) {
	defer conn.Close()
	d := &demo{conn: conn, in: bufio.NewReader(conn)}
	for r, ok := d.next(); ok; r, ok = d.next() {
		if r.Method == "session.send" {
			d.scene(r.Params.Prompt)
		}
	}
}

func (d *demo) scene(prompt string) {
	if !d.say("This is a demo. It repeats what you wrote, " + strconv.Quote(prompt) + ", and rolls a die.") {
		return
	}
	id := strconv.Itoa(d.count)
	call := object{"requestId": id, "toolCallId": id, "toolName": "roll_dice", "arguments": object{"sides": 6}}
	d.event("tool.execution_start", call)
	d.event("external_tool.requested", call)
	rolled, ok := d.answer("session.tools.handlePendingToolCall")
	if !ok {
		return
	}
	d.event("tool.execution_complete", object{"toolCallId": id, "success": true, "result": object{"content": rolled}})
	d.event("permission.requested", object{"requestId": id, "permissionRequest": object{"kind": "shell", "fullCommandText": "date"}})
	decision, ok := d.answer("session.permissions.handlePendingPermissionRequest")
	if !ok {
		return
	}
	kind, _ := decision.(map[string]any)
	if d.say(fmt.Sprintf("The die shows %v. The answer about running date was %v.", rolled, kind["kind"])) {
		d.event("session.idle", object{})
	}
}

// say streams a text; false when the client has interrupted.
func (d *demo) say(text string) bool {
	id := strconv.Itoa(d.count)
	for _, word := range strings.SplitAfter(text, " ") {
		d.event("assistant.message_delta", object{"messageId": id, "deltaContent": word})
		d.conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond)) // a pause, for the looks
		_, err := d.in.Peek(1)
		d.conn.SetReadDeadline(time.Time{})
		if err == nil {
			_, ok := d.answer("")
			return ok
		}
	}
	d.event("assistant.message", object{"messageId": id, "content": text})
	return true
}

// answer waits for what the client has to say to something; false when it interrupts the turn instead, or leaves.
func (d *demo) answer(method string) (any, bool) {
	for r, ok := d.next(); ok; r, ok = d.next() {
		switch r.Method {
		case method:
			return r.Params.Result, true
		case "session.abort":
			d.event("abort", object{"reason": "user_initiated"})
			d.event("session.idle", object{"aborted": true})
			return nil, false
		}
	}
	return nil, false
}

// next reads a request and accepts it; false at the end.
func (d *demo) next() (r request, ok bool) {
	header, err := textproto.NewReader(d.in).ReadMIMEHeader()
	if err != nil {
		return r, false
	}
	length, _ := strconv.ParseInt(header.Get("Content-Length"), 10, 64)
	if json.NewDecoder(io.LimitReader(d.in, length)).Decode(&r) != nil {
		return r, false
	}
	result := object{"success": true}
	switch r.Method {
	case "connect":
		result = object{"protocolVersion": copilot.MaxProtocolVersion, "version": "demo"}
	case "auth.getStatus":
		result = object{"isAuthenticated": true}
	case "session.create":
		d.session = r.Params.SessionID
		result = object{"sessionId": d.session}
	case "session.send":
		turn := fmt.Sprint("turn-", d.count)
		result = object{"messageId": turn}
		defer d.event("user.message", object{"messageId": turn, "content": r.Params.Prompt})
	}
	d.write(object{"jsonrpc": "2.0", "id": r.ID, "result": result})
	return r, true
}

func (d *demo) event(kind string, data object) {
	d.count++
	event := object{"id": strconv.Itoa(d.count), "timestamp": time.Now(), "type": kind, "data": data}
	d.write(object{"jsonrpc": "2.0", "method": "session.event", "params": object{"sessionId": d.session, "event": event}})
}

func (d *demo) write(message object) {
	body, _ := json.Marshal(message)
	fmt.Fprintf(d.conn, "Content-Length: %d\r\n\r\n%s", len(body), body) // where this fails, so does the next read
}
